"""Recompute: on the way back a stage computes anew what it has computed for a micro-batch on the way forward."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from autodist.graph.index import GraphIndex
from autodist.graph.names import is_control, node_of
from autodist.graph.op_types import is_stateless
from autodist.graph.ops import Trait, having
from autodist.graph.pipeline_schedule import Unit, kept_at_once
from autodist.graph.step_editor import StepEditor
from autodist.graph.walks import reach
from autodist.kernels.pipelined.execution_order import NodesOfUnits

_ONE_VALUE_AMONG_SEVERAL = having(Trait.ENTER | Trait.SWITCH | Trait.MERGE | Trait.BACK | Trait.EXIT)
_OF_LENGTHS_ALONE = having(Trait.BY_SHAPES) & having(Trait.OF_SHAPES)
"""A few numbers, for which nothing large is to be computed again."""


def recompute(
    editor: StepEditor, graph_index: GraphIndex, nodes: NodesOfUnits, turns: Mapping[Unit, str]
) -> dict[str, str]:
    """Lets units on the way back read copies of what they have read of the way forward, made when their turn comes.

        F: in → f → g → out,  B: gradient, f, g → …      becomes      B: in → f' → g',  gradient, f', g' → …

    So a stage keeps of each micro-batch that is on its way only what came into it, and that which may be made but once:
    random draws that advance a state, what reads variables, calls that have a state, branches of TensorFlow 1. Lengths
    it keeps as well. Copies wait for the turn and for no gradient, since the next stage is often still busy. As each
    waits for the turn, or for others that do, none is what TensorFlow takes for the same as its original.

    A stage that never has more than one micro-batch on its way goes back right after it went forward, and would gain
    nothing: it keeps all.

    Sources: T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; Y. Huang et al., "GPipe: Efficient
    Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019.

    Args:
        editor: of the worker's step.
        wiring: of the step before it was dealt out.
        nodes: of the worker's units, in the order of these.
        turns: for each unit but the first, the node that all in it waits for.

    Returns:
        For each copy its original.
    """
    originals: dict[str, str] = {}
    if kept_at_once(list(nodes)) > 1:
        for unit, turn in turns.items():
            if unit.is_backward:
                forward = nodes.get(replace(unit, is_backward=False), ())
                originals.update(_copy(editor, _made_anew(graph_index, nodes[unit], forward), nodes[unit], turn))
    return originals


def _made_anew(graph_index: GraphIndex, backward: Sequence[str], forward: Sequence[str]) -> list[str]:
    """Those nodes of a unit on the way forward that are to be copied for one on the way back."""
    may_be = {name for name in forward if _may_be_made_twice(graph_index, name)}

    def sources(name: str) -> list[str]:
        return [source for source in graph_index.data[name] if source in may_be]

    found = reach([source for name in backward for source in sources(name)], sources)
    return [name for name in forward if name in found]


def _may_be_made_twice(graph_index: GraphIndex, name: str) -> bool:
    op = graph_index.nodes[name].op
    is_left = op in _ONE_VALUE_AMONG_SEVERAL or op in _OF_LENGTHS_ALONE
    return not is_left and name not in graph_index.effects and is_stateless(op)


def _copy(editor: StepEditor, names: Sequence[str], readers: Collection[str], turn: str) -> dict[str, str]:
    """Copies nodes, for `readers` and for each other; what none of them leads to waits for `turn`."""
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
