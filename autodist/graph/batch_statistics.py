"""Sums and means of the batch that a loss sets beside values of single examples, as normalised advantages do.

On one device they are those of the whole batch, so replicas need those of all of them before they can go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autodist.graph.item import GraphItem
from autodist.graph.loss_terms import find_terms
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.propagation import Examples, Kind, Mean, PerExample, Propagation, Scalar, Sum, Unknown
from autodist.graph.seeds import joined_calls, live_calls
from autodist.graph.walks import reach


@dataclass(frozen=True)
class Place:
    """An input of a node.

    Attributes:
        node: its name.
        index: of the input, control inputs left out.
    """

    node: str
    index: int


Statistic = Sum | Mean
Statistics = Mapping[Place, Statistic]


def find_statistics(item: GraphItem, flows: Propagation, is_left: Callable[[str], bool]) -> Statistics | None:
    """The sums and means behind which it is no longer known how a loss depends on the batch, by the place of each.

    With a mean of what examples make of one another comes what they make it with: a variance's own mean.

    Args:
        item: the step.
        flows: how its tensors depend on the batch.
        is_left: whether a node is a layer's that sees its replica's examples by what it promises.

    Returns:
        None where all that is differentiated is known; nothing where something else than sums and means is in the way.
    """
    unknown = list(_unknown_parts(item, flows))
    if not unknown:
        return None
    found: dict[Place, Statistic] = {}
    for node in _first_unknown(item, flows, unknown):
        met = _met_at(item, flows, node)
        if not met:
            return {}
        found |= met
    names = [_inputs(item, place.node)[place.index] for place in found]
    for node in _mixing(item, flows, names):
        if not is_left(node):
            found |= _met_at(item, flows, node)
    return found


def _met_at(item: GraphItem, flows: Propagation, node: str) -> dict[Place, Statistic]:
    found: dict[Place, Statistic] = {}
    for k, name in enumerate(_inputs(item, node)):
        kind = flows.kind(name)
        if isinstance(kind, Sum | Mean) and _can_be_whole(kind) and item.spec_of(name).shape.is_fully_defined():
            found[Place(node, k)] = kind
    return found


def _inputs(item: GraphItem, node: str) -> list[str]:
    return [tensor(name) for name in item.wiring.nodes[node].input if not is_control(name)]


def _unknown_parts(item: GraphItem, flows: Propagation) -> Iterator[str]:
    """What is differentiated, or the parts of it, of which it is not known how they depend on the batch."""
    joined = joined_calls(item)
    for k in live_calls(item):
        call = item.gradient_calls[k]
        parts = [term.tensor for term in find_terms(item, flows, call)] or call.targets
        yield from (name for name in parts if k in joined and isinstance(flows.kind(name), Unknown))


def _first_unknown(item: GraphItem, flows: Propagation, names: Sequence[str]) -> Iterator[str]:
    """The nodes behind which nothing is known while all is before them."""
    front, seen = [node_of(name) for name in names], set()
    while front:
        node = front.pop()
        if node in seen:
            continue
        seen.add(node)
        unknown = [name for name in _inputs(item, node) if isinstance(flows.kind(name), Unknown)]
        if not unknown:
            yield node
        front += map(node_of, unknown)


def _mixing(item: GraphItem, flows: Propagation, names: Sequence[str]) -> set[str]:
    """The nodes before some tensors where examples meet what several of them have in common."""

    def mixed(name: str) -> list[str]:
        return [one for one in _inputs(item, node_of(name)) if _is_mixed(flows.kind(one))]

    seen = reach([name for name in names if _is_mixed(flows.kind(name))], mixed)
    return {node_of(name) for name in seen if isinstance(flows.kind(name), PerExample)}


def _is_mixed(kind: Kind) -> bool:
    return isinstance(kind, PerExample | Sum | Mean) and kind.mixed_at is not None


def _can_be_whole(kind: Sum | Mean) -> bool:
    return isinstance(kind, Sum) or isinstance(kind.weight, Examples | Scalar)
