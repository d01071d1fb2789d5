"""Recomputation in a pipeline: a stage repeats the forward unit of a micro-batch before the backward unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autodist.graph.index import GraphIndex
from autodist.graph.pipeline_schedule import Unit, max_in_flight
from autodist.graph.recomputation import Block, blocks_of_nodes, is_repeatable
from autodist.graph.step import ReplicatedStep, Step
from autodist.graph.step_editor import StepEditor
from autodist.graph.walks import reach
from autodist.kernels.pipelined.execution_order import NodesOfUnits
from autodist.kernels.recompute import recompute


def recompute_units(
    editor: StepEditor[Step],
    step: ReplicatedStep,
    nodes: NodesOfUnits,
    turns: Mapping[Unit, str],
    blocks: Sequence[Block],
) -> dict[str, str]:
    """Makes backward units read copies of forward nodes, which are recomputed when the backward unit starts.

        F: in → f → g → out,  B: gradient, f, g → …      becomes      B: in → f' → g',  gradient, f', g' → …

    For each micro-batch in flight, a stage then keeps only its inputs and the values of nodes that must not run twice:
    random ops that advance a state, reads of variables, stateful calls, branches of TensorFlow 1. It also keeps
    lengths. Copies wait for the start of the unit but not for a gradient, since the next stage is often still busy.

    A stage that never has more than one micro-batch in flight runs each backward unit right after the forward unit. It
    would save no memory, so it recomputes nothing.

    Source: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS
    2019.

    Args:
        editor: the editor of the worker's step.
        step: the step before it was distributed over workers.
        nodes: the nodes of the worker's units, in execution order.
        turns: for each unit but the first, the node that its nodes wait for.
        blocks: the layers to recompute; empty: all.

    Returns:
        The original of each copy.
    """
    originals: dict[str, str] = {}
    if max_in_flight(list(nodes)) > 1:
        for unit, turn in turns.items():
            if unit.is_backward:
                forward = _in_blocks(step, nodes.get(replace(unit, is_backward=False), ()), blocks)
                found = _recomputed(step.graph_index, nodes[unit], forward)
                originals.update(recompute(editor, found, nodes[unit], [turn], prefix="autodist/recomputed/"))
    return originals


def _in_blocks(step: ReplicatedStep, names: Sequence[str], blocks: Sequence[Block]) -> Sequence[str]:
    """Returns the nodes that belong to the blocks; all if there are no blocks."""
    if not blocks:
        return names
    return list(blocks_of_nodes({name: step.replica_of(name)[1] for name in names}, blocks))


def _recomputed(graph_index: GraphIndex, backward: Sequence[str], forward: Sequence[str]) -> list[str]:
    """Returns the nodes of a forward unit to copy for its backward unit."""
    repeatable = {name for name in forward if is_repeatable(graph_index, name)}

    def sources(name: str) -> list[str]:
        return [source for source in graph_index.data[name] if source in repeatable]

    found = reach([source for name in backward for source in sources(name)], sources)
    return [name for name in forward if name in found]
