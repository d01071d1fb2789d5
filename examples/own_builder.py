"""A custom strategy builder: embeddings stay on one worker, all other gradients are all-reduced.

    python examples/skip_gram.py --cluster examples/cluster_own_builder.yml

A YAML names it by module and class, so the module must be in the script's folder, or installed, on every machine.
"""

from dataclasses import dataclass

from autodist.strategies import (
    StrategyBuilder,
    all_reduce_node,
    make_strategy,
    owner_index,
    parameter_server_node,
    synced_variables,
)


@dataclass(frozen=True)
class EmbeddingsAtOne(StrategyBuilder):
    """Assigns variables with sparse gradients to one worker; the fields are the options of the YAML."""

    owner: int | str = 0

    def build(self, graph_item, resource_spec):
        variables = synced_variables(graph_item)
        owner = owner_index(self.owner, resource_spec)
        nodes = [
            parameter_server_node(variable.name, owner) if variable.is_sparse else all_reduce_node(variable.name)
            for variable in variables
        ]
        return make_strategy("EmbeddingsAtOne", resource_spec, variables, nodes)
