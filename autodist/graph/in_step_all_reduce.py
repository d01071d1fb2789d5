"""In-step all-reduces: sums over all replicas while a step computes, as in synchronized batch normalisation.

They include all-gathers: the rows of all replicas concatenated, for a loss that compares examples with each other. In
the captured graph, an in-step all-reduce is a `PlaceholderWithDefault` whose default is the replica's own value, which
is the result on one device.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autodist.graph.names import node_of

if TYPE_CHECKING:
    from autodist.graph.step import CapturedStep

SUM_NAME = "autodist_whole_sum"
"""Name of these PlaceholderWithDefault nodes."""


class InStepAllReduceKind(enum.Enum):
    """The kind of result that replaces a replica's own value."""

    SUM = "sum"  # the sum over all replicas
    ROWS = "rows"  # the concatenated rows of all replicas
    OWN_ROWS = "own rows"  # the replica's rows of the sum over all replicas: the gradient of ROWS


@dataclass(frozen=True)
class InStepAllReduce:
    """A tensor that is summed or gathered over all replicas before the replicas use it.

    Attributes:
        node: the PlaceholderWithDefault that stands for the result.
        of: the node of the in-step all-reduce whose gradient this is; None if it is no gradient. All replicas read
            the result of that node, so the gradient is the sum over all of them.
        is_mean: True if the script requests the mean of the replicas' values.
        how: the kind of the result.
        axis: the axis of the rows; unused for a sum.
        is_asked: True if the script requests it. If not, replicas use their own value under stale or asynchronous
            updates, where workers do not wait for each other.
    """

    node: str
    of: str | None = None
    is_mean: bool = False
    how: InStepAllReduceKind = InStepAllReduceKind.SUM
    axis: int = 0
    is_asked: bool = True


def find_depths(step: CapturedStep) -> Mapping[str, int]:
    """Maps each node to its communication round: the longest chain of exchanges between replicas up to the node.

    The exchange at the node itself counts. Exchanges of equal depth do not wait for each other. The seed of a loss and
    the value of a loss term count as exchanges, which follow all values that the loss is computed from.
    """
    sums = {s.node for s in step.in_step_all_reduces}
    known: dict[str, int] = {}
    for call in step.gradient_calls:
        depths = _walk(step, sums, known)
        behind = [*call.targets, *(term.tensor for term in call.terms)]
        depth = 1 + max((depths.get(node_of(name), 0) for name in behind), default=0)
        known |= dict.fromkeys([call.seed, *(name for t in call.terms for name in (t.seed, t.value))], depth)
    return _walk(step, sums, known)


def _walk(step: CapturedStep, sums: set[str], known: Mapping[str, int]) -> dict[str, int]:
    result: dict[str, int] = {}
    for name in step.graph_index.order:
        depth = max((result.get(source, 0) for source in step.graph_index.sources[name]), default=0)
        result[name] = max(depth + (name in sums), known.get(name, 0))
    return result
