"""Whole sums: what a step adds up over all replicas while it computes, as synchronized batch normalisation does.

So is what it gathers: rows of all replicas, one after the other, as a loss that compares examples with each other asks
for. In the captured graph a whole sum is a `PlaceholderWithDefault` of the replica's own: on one device it is that.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autodist.graph.names import node_of

if TYPE_CHECKING:
    from autodist.graph.step import Step

SUM_NAME = "autodist_whole_sum"
"""What the nodes are called."""


class InStepAllReduceKind(enum.Enum):
    """What replicas go on with in place of what each of them has."""

    SUM = "sum"  # of all replicas'
    ROWS = "rows"  # of all replicas, one replica's after another's
    OWN_ROWS = "own rows"  # of the sum of all replicas', each its own: the gradient of ROWS


@dataclass(frozen=True)
class InStepAllReduce:
    """A tensor that is added up or gathered over all replicas before the replicas go on with it.

    Attributes:
        node: the PlaceholderWithDefault that stands for the whole.
        of: where it is the gradient of another whole sum, that one's node: replicas read the whole, so that what each
            makes of it counts for all. None: it is none.
        is_mean: whether the script asks for the mean of the replicas' values.
        how: what the whole is.
        axis: along which rows stand, if it is not a sum alone.
        is_asked: whether the script asks for it; if not, replicas go by their own where no step waits for another.
    """

    node: str
    of: str | None = None
    is_mean: bool = False
    how: InStepAllReduceKind = InStepAllReduceKind.SUM
    axis: int = 0
    is_asked: bool = True


def find_depths(item: Step) -> Mapping[str, int]:
    """For each node, how many exchanges between replicas stand one behind the other before it, its own among them.

    Exchanges of equal depth do not wait for each other. A seed, and what the whole batch has for a term of a loss,
    count as exchanges of all that the loss is made of.
    """
    sums = {s.node for s in item.whole_sums}
    given: dict[str, int] = {}
    for call in item.gradient_calls:
        depths = _walk(item, sums, given)
        behind = [*call.targets, *(term.tensor for term in call.terms)]
        depth = 1 + max((depths.get(node_of(name), 0) for name in behind), default=0)
        given |= dict.fromkeys([call.seed, *(name for t in call.terms for name in (t.seed, t.value))], depth)
    return _walk(item, sums, given)


def _walk(item: Step, sums: set[str], given: Mapping[str, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in item.graph_index.order:
        depth = max((found.get(source, 0) for source in item.graph_index.sources[name]), default=0)
        found[name] = max(depth + (name in sums), given.get(name, 0))
    return found
