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


@dataclass(frozen=True)
class BatchSearch:
    """A captured step in which values of the whole batch are searched.

    Attributes:
        step: the step.
        flows: the dependence of its tensors on the batch.
        is_left: returns True for a node that must see the examples of its replica alone, such as those of plain batch
            normalisation.
    """

    step: CapturedStep
    flows: Propagation
    is_left: Callable[[str], bool]

    def kind(self, name: str) -> Kind:
        """Returns how a tensor depends on the batch."""
        return self.flows.kind(name)

    def inputs(self, node: str) -> list[str]:
        """Returns the tensors that a node reads."""
        return self.step.graph_index.inputs(node)

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Returns the tensors whose dependence on the batch is unknown, except shapes that hold its length.

        Those only give other tensors their rows.
        """
        return [name for name in names if isinstance(self.kind(name), Unknown) and not self.holds_length(name)]

    def holds_length(self, name: str) -> bool:
        """Returns True for a shape that holds the length of the batch."""
        return isinstance(self.kind(name), Lengths)


_OF_SHAPES = having(Trait.OF_SHAPES)

Statistic = Sum | Mean
Statistics = Mapping[NodeInput, Statistic]


def find_statistics(search: BatchSearch, calls: Iterable[int] | None = None) -> Statistics | None:
    """Returns the sums and means because of which replicas would not compute the loss of one device.

    They make the dependence of a loss on the batch unknown. A variance is one, and then its mean is returned too. In
    covariances of features, they matter although the dependence of the loss on the batch is known.

    Args:
        search: the step.
        calls: positions of the calls of `gradient` to consider; None: those whose gradients are summed over the
            replicas.

    Returns:
        The statistics, by the inputs of nodes that read them. None if all differentiated tensors are known and equal
        those of one device. Empty if the obstacle is something other than sums and means.
    """
    parts = list(differentiated_parts(search, _reduced(search.step) if calls is None else calls))
    unknown = search.unknown(parts)
    if unknown:
        return met_behind(search, unknown)
    begun = [node for node in _mixing(search, parts) if not search.is_left(node) and _begins(search, node)]
    return _find_at_each(search, begun) if begun else None


def find_unknown(search: BatchSearch) -> list[str]:
    """Returns the nodes because of which it is unknown how a loss depends on the batch; all their inputs are known."""
    return list(first_unknown(search, search.unknown(differentiated_parts(search, _reduced(search.step)))))


def met_at(search: BatchSearch, place: NodeInput, name: str) -> dict[NodeInput, Statistic]:
    """Returns the sum or mean of the batch that an input reads, or the sums and means that make it unknown."""
    kind = search.kind(name)
    if isinstance(kind, Sum | Mean) and can_be_whole(search.step, name, kind):
        return {place: kind}
    return met_behind(search, search.unknown([name]))


def met_behind(search: BatchSearch, unknown: Sequence[str]) -> dict[NodeInput, Statistic]:
    """Returns the sums and means that make the given tensors unknown; empty if there is another obstacle."""
    return _find_at_each(search, first_unknown(search, unknown))


def met_mixing(search: BatchSearch, names: Sequence[str]) -> dict[NodeInput, Statistic]:
    """Returns the sums and means that are combined with examples on the way to the given tensors."""
    result: dict[NodeInput, Statistic] = {}
    for node in _mixing(search, names):
        if not search.is_left(node):
            result |= _find_at(search, node)
    return result


def _find_at_each(search: BatchSearch, nodes: Iterable[str]) -> dict[NodeInput, Statistic]:
    statistics: dict[NodeInput, Statistic] = {}
    for node in nodes:
        met = _find_at(search, node)
        if not met:
            return {}
        statistics |= met
    return statistics | met_mixing(search, [search.inputs(place.node)[place.index] for place in statistics])


def _find_at(search: BatchSearch, node: str) -> dict[NodeInput, Statistic]:
    result: dict[NodeInput, Statistic] = {}
    for k, name in enumerate(search.inputs(node)):  # an input may be unknown: for instance, the root of a mean
        result |= met_at(search, NodeInput(node, k), name)
    return result or met_behind(search, list(filter(search.holds_length, search.inputs(node))))


def _reduced(step: CapturedStep) -> list[int]:
    reduced = reduced_calls(step)
    return [k for k in live_calls(step) if k in reduced]


def differentiated_parts(search: BatchSearch, calls: Iterable[int]) -> Iterator[str]:
    """Yields the tensors that the given calls differentiate, or their terms."""
    for k in calls:
        call = search.step.gradient_calls[k]
        yield from [term.tensor for term in find_terms(search.step, search.flows, call)] or call.targets


def first_unknown(search: BatchSearch, names: Sequence[str]) -> Iterator[str]:
    """Yields the nodes whose outputs are unknown while all inputs are known, or are shapes that hold the batch."""
    front, seen = [node_of(name) for name in names], set()
    while front:
        node = front.pop()
        if node in seen:
            continue
        seen.add(node)
        unknown = search.unknown(search.inputs(node))
        counts_rows = search.step.graph_index.nodes[node].op in _OF_SHAPES  # which are known
        if not unknown and not counts_rows:
            yield node
        front += map(node_of, unknown)


def _mixing(search: BatchSearch, names: Sequence[str]) -> set[str]:
    """Returns the nodes before the given tensors that combine examples with a sum or mean of several examples."""

    def mixed(name: str) -> list[str]:
        return [one for one in search.inputs(node_of(name)) if is_mixed(search.kind(one))]

    seen = reach([name for name in names if is_mixed(search.kind(name))], mixed)
    return {node_of(name) for name in seen if isinstance(search.kind(name), PerExample)}


def _begins(search: BatchSearch, node: str) -> bool:
    return not any(is_mixed(search.kind(name)) for name in search.inputs(node))


def is_mixed(kind: Kind) -> bool:
    return isinstance(kind, PerExample | Sum | Mean) and kind.mixed_at is not None


def can_be_whole(step: CapturedStep, name: str, kind: Statistic) -> bool:
    """Returns True if replicas can reduce the statistic while the step computes."""
    weight = kind.weight if isinstance(kind, Mean) else None
    while isinstance(weight, Total):
        weight = weight.weight
    return not isinstance(weight, Elements) and step.spec_of(name).shape.is_fully_defined()
