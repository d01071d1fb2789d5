"""Bytes that go from each worker to each other in one step, by formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm

from autodist.proto import strategy_pb2
from autodist.strategies.cost import traffic
from autodist.strategies.nodes import alike_pieces, whole_node
from autodist.strategies.variables import SyncedVariable
from autodist.synchronizers import Subgroups, Synchronizer, cut_of

WorkerConnection = tuple[int, int]
"""The worker that sends and the one that receives."""


def link_bytes(
    variable: SyncedVariable, node: strategy_pb2.VariableNode, config: strategy_pb2.GraphConfig, rows: int = 0
) -> dict[WorkerConnection, int]:
    """What one variable makes each worker send to each other, in bytes a step; links without any are left out.

    What a worker sends (`traffic`) goes to a parameter server's owner, or from there to all others alike. An all-reduce
    by SHUFFLE, and gathered rows, go to all others alike; RING and NCCL send all to the next worker;
    HIERARCHICAL to its team and to workers of other teams (`Subgroups.shares`).

    Args:
        variable: of the captured step.
        node: how it is kept and synchronised.
        config: of the strategy, with specs resolved.
        rows: of a sparse variable, that each worker touches in a step.
    """
    cut, computing = cut_of(node), sorted({replica.worker for replica in config.replicas})
    teams = Subgroups.of(config.teams, computing)
    is_shared = cut is not None and cut.axis == 0
    indices = max(variable.shape[0], 1) if is_shared else 1
    # Whole numbers of such parts of a byte: fractions would cost ten times as much, on as many links as workers².
    parts = lcm(indices, *range(max(len(computing) - 1, 1), len(computing) + 1))
    sent: dict[WorkerConnection, int] = {}
    for piece, synchronizer, count in alike_pieces(variable, node):
        share = piece.shape[0] if is_shared else 1
        cost = traffic(piece, whole_node(piece.name, synchronizer), config)
        for worker, (step, row) in enumerate(zip(cost.step, cost.row, strict=True)):
            if not (step or row):
                continue
            shares = _shares(synchronizer, piece, worker, computing, teams)
            scaled = count * (step * parts + row * rows * share * (parts // indices))
            total = sum(shares.values())
            for target, part in shares.items():
                link = worker, target
                sent[link] = sent.get(link, 0) + scaled * part // total
    return {link: _nearest(count, parts) for link, count in sorted(sent.items()) if count}


def _shares(
    synchronizer: Synchronizer, piece: SyncedVariable, worker: int, computing: Sequence[int], teams: Subgroups | None
) -> Mapping[int, int]:
    """By the workers to which one sends, in what proportion."""
    if teams is not None and synchronizer.goes_by_teams:
        return teams.shares(worker, piece.is_sparse or synchronizer.goes_to_all)
    return dict.fromkeys(synchronizer.targets(worker, computing), 1)


def _nearest(count: int, parts: int) -> int:
    """`count / parts` as a whole number, the even one of two that are as near."""
    whole, rest = divmod(count, parts)
    return whole + (2 * rest > parts or (2 * rest == parts and whole % 2))


def sums_by_worker(links: Mapping[WorkerConnection, int], workers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What each worker sends to all others, and what it receives from them."""
    sent, received = [0] * workers, [0] * workers
    for (source, target), count in links.items():
        sent[source] += count
        received[target] += count
    return tuple(sent), tuple(received)
