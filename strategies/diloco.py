"""DiLoCo: workers make local steps, and average the changes of their copies from time to time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.all_reduce import AllReduceOptions, all_reduce_nodes
from autodist.strategies.base import StrategyBuilder, make_strategy
from autodist.strategies.registry import register
from autodist.strategies.variables import GraphLike, synced_variables
from autodist.synchronizers import LocalSteps

Steps = Annotated[int, Field(ge=1, lt=2**31)]
LearningRate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Momentum = Annotated[float, Field(ge=0, lt=1)]


@register
@dataclass(frozen=True)
class DiLoCo(AllReduceOptions, StrategyBuilder):
    """Each worker makes `local_steps` steps on its own part of the batches; then the changes are averaged.

    For slow or far links, such as an office network or two sites: most steps send nothing and wait for no one. The
    result is not that of one device, but that of workers that train apart and meet at times. Options of the script's
    optimizer apply to the local steps. The average change, weighted by the examples of each worker, is the gradient of
    an outer step with Nesterov's momentum. With an outer learning rate of 1 and no momentum, the copies are averaged
    (local SGD, federated averaging).

    Cost: with W workers and b bytes of variables (after compression), each worker sends 2·b·(W-1)/W bytes every
    `local_steps` steps, and receives as many. A table is sent whole. Memory: a copy of each variable on each worker,
    and another one for the momentum.

    Sources: A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023
    (arXiv 2311.08105); B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
    AISTATS 2017; S. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.

    Attributes: those of AllReduceOptions, for the outer step, and
        local_steps: the number of training steps from one outer step to the next.
        outer_learning_rate: the learning rate of the outer step.
        outer_momentum: its Nesterov momentum.
    """

    local_steps: Steps = 64
    outer_learning_rate: LearningRate = 0.7
    outer_momentum: Momentum = 0.9

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        variables = synced_variables(graph_item)
        local = LocalSteps(self.local_steps, self.outer_learning_rate, self.outer_momentum)
        return make_strategy("DiLoCo", resource_spec, variables, all_reduce_nodes(variables, self, local))
