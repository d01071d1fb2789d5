"""Rows that a loss takes by their position in the batch are refused: each replica has other rows at that position."""

from __future__ import annotations

from collections.abc import Iterator

from autodist.capture.batch_requirements import Dealt
from autodist.errors import CaptureError
from autodist.graph.flows import flows_of
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.ops import Trait, having
from autodist.graph.propagation import ByPosition, Propagation, Unknown
from autodist.graph.seeds import joined_calls, live_calls
from autodist.graph.step import Step
from autodist.graph.walks import reach

_OF_SHAPES = having(Trait.OF_SHAPES)


def require_no_rows_by_position(item: Step, dealt: Dealt) -> None:
    """Passes unless what is trained depends on rows of the batch that constants name by their position.

    Raises:
        CaptureError: it does, and the batch is divided among several replicas.
    """
    if dealt.replicas == 1 or dealt.examples == 0 or not item.gradient_calls:
        return
    if all(axis is None for axis in item.inputs.values()):
        return
    taken = next(_taken_by_position(item, flows_of(item), dealt.examples), None)
    if taken is None:
        return
    node, line = item.graph_index.nodes[node_of(taken)], item.origin_of(node_of(taken))
    split = [dealt.names.get(name, node_of(name)) for name, axis in item.inputs.items() if axis is not None]
    axes = ", ".join(f'"{name}": None' for name in dict.fromkeys(split))
    raise CaptureError(
        f"{node.name} ({node.op}{f', {line}' if line else ''}) takes rows of the batch by their position, as y[2:] "
        f"does, and a loss depends on them. Each of the {dealt.replicas} replicas has a part of the batch, whose rows "
        f"at that position are others. Give every replica the whole batch (batch_axis={{{axes}}}); or pass what tells "
        "the rows apart as an input with a row for each example, a mask say; or train with one replica."
    )


def _taken_by_position(item: Step, flows: Propagation, examples: int) -> Iterator[str]:
    """The tensors with such rows on which a loss depends, whose gradients are added up over the replicas."""
    joined = joined_calls(item)
    targets = [t for k in live_calls(item) if k in joined for t in item.gradient_calls[k].targets]
    for name in reach(targets, lambda name: _unknown_inputs(item, flows, name)):
        kind = flows.kind(name)
        if isinstance(kind, ByPosition) and (kind.whole_up_to is None or examples > kind.whole_up_to):
            if not any(isinstance(flows.kind(i), ByPosition) for i in _unknown_inputs(item, flows, name)):
                yield name


def _unknown_inputs(item: Step, flows: Propagation, name: str) -> list[str]:
    """What a tensor is made of that is not known; of what shows a shape alone, nothing."""
    node = item.graph_index.nodes[node_of(name)]
    if node.op in _OF_SHAPES:
        return []
    return [tensor(i) for i in node.input if not is_control(i) and isinstance(flows.kind(tensor(i)), Unknown)]
