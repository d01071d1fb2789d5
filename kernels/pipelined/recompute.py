"""Rematerialization: a stage recomputes forward activations of a micro-batch in its backward pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from autodist.graph.index import GraphIndex
from autodist.graph.names import is_control, node_of
from autodist.graph.op_types import is_stateless
from autodist.graph.ops import Trait, having
from autodist.graph.pipeline_schedule import Unit, max_in_flight
from autodist.graph.step import Step
from autodist.graph.step_editor import StepEditor
from autodist.graph.walks import reach
from autodist.kernels.pipelined.execution_order import NodesOfUnits

_ONE_VALUE_AMONG_SEVERAL = having(Trait.ENTER | Trait.SWITCH | Trait.MERGE | Trait.BACK | Trait.EXIT)
_OF_LENGTHS_ALONE = having(Trait.BY_SHAPES) & having(Trait.OF_SHAPES)
"""Ops whose results are a few numbers, which are not worth recomputing."""


def recompute(
    editor: StepEditor[Step], graph_index: GraphIndex, nodes: NodesOfUnits, turns: Mapping[Unit, str]
) -> dict[str, str]:
    """Makes backward units read copies of forward nodes, which are recomputed when the backward unit starts.

        F: in → f → g → out,  B: gradient, f, g → …      becomes      B: in → f' → g',  gradient, f', g' → …

    For each micro-batch in flight, a stage then keeps only its inputs and the values of nodes that must not run twice:
    random ops that advance a state, reads of variables, stateful calls, branches of TensorFlow 1. It also keeps
    lengths. Copies wait for the start of the unit but not for a gradient, since the next stage is often still busy. As
    each copy waits for the start, or for copies that do, TensorFlow's optimizer does not merge it with its original.

    A stage that never has more than one micro-batch in flight runs each backward unit right after the forward unit. It
    would save no memory, so it recomputes nothing.

    Sources: T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; Y. Huang et al., "GPipe: Efficient
    Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019.

    Args:
        editor: the editor of the worker's step.
        graph_index: the index of the step before it was distributed over workers.
        nodes: the nodes of the worker's units, in execution order.
        turns: for each unit but the first, the node that its nodes wait for.

    Returns:
        The original of each copy.
    """
    originals: dict[str, str] = {}
    if max_in_flight(list(nodes)) > 1:
        for unit, turn in turns.items():
            if unit.is_backward:
                forward = nodes.get(replace(unit, is_backward=False), ())
                originals.update(_copy(editor, _recomputed(graph_index, nodes[unit], forward), nodes[unit], turn))
    return originals


def _recomputed(graph_index: GraphIndex, backward: Sequence[str], forward: Sequence[str]) -> list[str]:
    """Returns the nodes of a forward unit to copy for its backward unit."""
    repeatable = {name for name in forward if _is_repeatable(graph_index, name)}

    def sources(name: str) -> list[str]:
        return [source for source in graph_index.data[name] if source in repeatable]

    found = reach([source for name in backward for source in sources(name)], sources)
    return [name for name in forward if name in found]


def _is_repeatable(graph_index: GraphIndex, name: str) -> bool:
    op = graph_index.nodes[name].op
    is_left = op in _ONE_VALUE_AMONG_SEVERAL or op in _OF_LENGTHS_ALONE
    return not is_left and name not in graph_index.effects and is_stateless(op)


def _copy(editor: StepEditor[Step], names: Sequence[str], readers: Collection[str], turn: str) -> dict[str, str]:
    """Copies nodes for `readers` and for each other; copies that depend on no other copy wait for `turn`."""
    copies = editor.clone(names, "autodist/recomputed/")
    made = set(copies.values())
    for copy in copies.values():
        inputs = [i for i in editor[copy].input if not is_control(i)]
        follows = any(node_of(i) in made for i in inputs)
        editor.set_inputs(copy, inputs if follows else [*inputs, f"^{turn}"])
    for reader in readers:
        editor.set_inputs(reader, [_in_copies(i, copies) for i in editor[reader].input])
    return {copy: name for name, copy in copies.items()}


def _in_copies(spelling: str, copies: Mapping[str, str]) -> str:
    source = node_of(spelling)
    if is_control(spelling) or source not in copies:
        return spelling
    return copies[source] + spelling[len(source) :]
