"""Statistics: sums and means over the batch that a loss combines with single examples, as in normalised advantages.

On one device they cover the whole batch. A replica therefore needs the statistic of all replicas before it continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autodist.graph.loss_terms import find_terms
from autodist.graph.names import node_of
from autodist.graph.ops import Trait, having
from autodist.graph.seeds import live_calls, reduced_calls
from autodist.graph.step import CapturedStep
from autodist.graph.walks import reach
from autodist.layout import Elements, Kind, Lengths, Mean, PerExample, Propagation, Sum, Total, Unknown


@dataclass(frozen=True)
class NodeInput:
    """An input of a node.

    Attributes:
        node: the name of the node.
        index: the position among the inputs; control inputs do not count.
    """

    node: str
    index: int


_OF_SHAPES = having(Trait.OF_SHAPES)

Statistic = Sum | Mean
Statistics = Mapping[NodeInput, Statistic]


def find_statistics(
    step: CapturedStep, flows: Propagation, is_left: Callable[[str], bool], calls: Iterable[int] | None = None
) -> Statistics | None:
    """Returns the sums and means because of which replicas would not compute the loss of one device.

    They make the dependence of a loss on the batch unknown. A variance is one, and then its mean is returned too. In
    covariances of features, they matter although the dependence of the loss on the batch is known.

    Args:
        step: the step.
        flows: the dependence of its tensors on the batch.
        is_left: returns True for a node that must see the examples of its replica alone, such as those of plain batch
            normalisation.
        calls: positions of the calls of `gradient` to consider; None: those whose gradients are summed over the
            replicas.

    Returns:
        The statistics, by the inputs of nodes that read them. None if all differentiated tensors are known and equal
        those of one device. Empty if the obstacle is something other than sums and means.
    """
    parts = list(differentiated_parts(step, flows, _reduced(step) if calls is None else calls))
    unknown = [name for name in parts if isinstance(flows.kind(name), Unknown)]
    if unknown:
        return met_behind(step, flows, unknown, is_left)
    begun = [node for node in _mixing(step, flows, parts) if not is_left(node) and _begins(step, flows, node)]
    if begun:
        return _find_at_each(step, flows, begun, is_left)
    return None


def find_unknown(step: CapturedStep, flows: Propagation) -> list[str]:
    """Returns the nodes because of which it is unknown how a loss depends on the batch; all their inputs are known."""
    parts = differentiated_parts(step, flows, _reduced(step))
    return list(first_unknown(step, flows, [name for name in parts if isinstance(flows.kind(name), Unknown)]))


def met_behind(
    step: CapturedStep, flows: Propagation, unknown: Sequence[str], is_left: Callable[[str], bool]
) -> dict[NodeInput, Statistic]:
    """Returns the sums and means that make the given tensors unknown; empty if there is another obstacle."""
    return _find_at_each(step, flows, first_unknown(step, flows, unknown), is_left)


def met_mixing(
    step: CapturedStep, flows: Propagation, names: Sequence[str], is_left: Callable[[str], bool]
) -> dict[NodeInput, Statistic]:
    """Returns the sums and means that are combined with examples on the way to the given tensors."""
    result: dict[NodeInput, Statistic] = {}
    for node in _mixing(step, flows, names):
        if not is_left(node):
            result |= _find_at(step, flows, node, is_left)
    return result


def _find_at_each(
    step: CapturedStep, flows: Propagation, nodes: Iterable[str], is_left: Callable[[str], bool]
) -> dict[NodeInput, Statistic]:
    statistics: dict[NodeInput, Statistic] = {}
    for node in nodes:
        met = _find_at(step, flows, node, is_left)
        if not met:
            return {}
        statistics |= met
    return statistics | met_mixing(
        step, flows, [step.graph_index.inputs(place.node)[place.index] for place in statistics], is_left
    )


def _find_at(
    step: CapturedStep, flows: Propagation, node: str, is_left: Callable[[str], bool]
) -> dict[NodeInput, Statistic]:
    result: dict[NodeInput, Statistic] = {}
    for k, name in enumerate(step.graph_index.inputs(node)):
        kind = flows.kind(name)
        if isinstance(kind, Sum | Mean) and can_be_whole(step, name, kind):
            result[NodeInput(node, k)] = kind
        elif _is_obstacle(kind):  # although the examples before it are known: for instance, the root of a mean
            result |= met_behind(step, flows, [name], is_left)
    lengths = [name for name in step.graph_index.inputs(node) if isinstance(flows.kind(name), Lengths)]
    return result or met_behind(step, flows, lengths, is_left)


def _reduced(step: CapturedStep) -> list[int]:
    reduced = reduced_calls(step)
    return [k for k in live_calls(step) if k in reduced]


def differentiated_parts(step: CapturedStep, flows: Propagation, calls: Iterable[int]) -> Iterator[str]:
    """Yields the tensors that the given calls differentiate, or their terms."""
    for k in calls:
        call = step.gradient_calls[k]
        yield from [term.tensor for term in find_terms(step, flows, call)] or call.targets


def first_unknown(step: CapturedStep, flows: Propagation, names: Sequence[str]) -> Iterator[str]:
    """Yields the nodes whose outputs are unknown while all inputs are known, or are shapes that hold the batch."""
    front, seen = [node_of(name) for name in names], set()
    while front:
        node = front.pop()
        if node in seen:
            continue
        seen.add(node)
        unknown = [name for name in step.graph_index.inputs(node) if _is_obstacle(flows.kind(name))]
        counts_rows = step.graph_index.nodes[node].op in _OF_SHAPES  # which are known
        if not unknown and not counts_rows:
            yield node
        front += map(node_of, unknown)


def _is_obstacle(kind: Kind) -> bool:
    """Returns True if a tensor's dependence on the batch is unknown, unless it only gives other tensors their rows."""
    return isinstance(kind, Unknown) and not isinstance(kind, Lengths)


def _mixing(step: CapturedStep, flows: Propagation, names: Sequence[str]) -> set[str]:
    """Returns the nodes before the given tensors that combine examples with a sum or mean of several examples."""

    def mixed(name: str) -> list[str]:
        return [one for one in step.graph_index.inputs(node_of(name)) if is_mixed(flows.kind(one))]

    seen = reach([name for name in names if is_mixed(flows.kind(name))], mixed)
    return {node_of(name) for name in seen if isinstance(flows.kind(name), PerExample)}


def _begins(step: CapturedStep, flows: Propagation, node: str) -> bool:
    return not any(is_mixed(flows.kind(name)) for name in step.graph_index.inputs(node))


def is_mixed(kind: Kind) -> bool:
    return isinstance(kind, PerExample | Sum | Mean) and kind.mixed_at is not None


def can_be_whole(step: CapturedStep, name: str, kind: Statistic) -> bool:
    """Returns True if replicas can reduce the statistic while the step computes."""
    weight = kind.weight if isinstance(kind, Mean) else None
    while isinstance(weight, Total):
        weight = weight.weight
    return not isinstance(weight, Elements) and step.spec_of(name).shape.is_fully_defined()
