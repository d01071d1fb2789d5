"""Estimates the bytes that each worker sends to each other worker in one step, by formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm

from autodist.proto import strategy_pb2
from autodist.strategies.cost import traffic
from autodist.strategies.nodes import distinct_shards, whole_node
from autodist.strategies.variables import SyncedVariable
from autodist.synchronizers import Subgroups, Synchronizer, partitioning_of

WorkerConnection = tuple[int, int]
"""The sending and the receiving worker."""


def link_bytes(
    variable: SyncedVariable, node: strategy_pb2.VariableNode, config: strategy_pb2.GraphConfig, rows: int = 0
) -> dict[WorkerConnection, int]:
    """Computes the bytes a step that one variable makes each worker send to each other; unused links are left out.

    The bytes that a worker sends (`traffic`) go to a parameter server's owner, or from there to all other workers in
    equal parts. All-reduce by SHUFFLE, and gathered rows, go to all other workers in equal parts. RING and NCCL send
    everything to the next worker; HIERARCHICAL sends to its subgroup and to workers of others (`Subgroups.shares`).

    Args:
        variable: of the captured step.
        node: its placement and synchronisation.
        config: of the strategy, with specs resolved.
        rows: number of rows of a sparse variable that each worker touches in a step.
    """
    cut, computing = partitioning_of(node), sorted({replica.worker for replica in config.replicas})
    teams = Subgroups.of(config.teams, computing)
    is_shared = cut is not None and cut.axis == 0
    indices = max(variable.shape[0], 1) if is_shared else 1
    # Integer parts of a byte: fractions would take ten times as long, for a number of links quadratic in workers.
    parts = lcm(indices, *range(max(len(computing) - 1, 1), len(computing) + 1))
    sent: dict[WorkerConnection, int] = {}
    for piece, synchronizer, count in distinct_shards(variable, node):
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
    """Returns, by receiving worker, its proportion of the bytes that `worker` sends."""
    if teams is not None and synchronizer.uses_subgroups:
        return teams.shares(worker, piece.is_sparse or synchronizer.goes_to_all)
    return dict.fromkeys(synchronizer.targets(worker, computing), 1)


def _nearest(count: int, parts: int) -> int:
    """Returns `count / parts` rounded to the nearest integer, ties to even."""
    whole, rest = divmod(count, parts)
    return whole + (2 * rest > parts or (2 * rest == parts and whole % 2))


def sums_by_worker(links: Mapping[WorkerConnection, int], workers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the bytes that each worker sends to all others, and those that it receives from them."""
    sent, received = [0] * workers, [0] * workers
    for (source, target), count in links.items():
        sent[source] += count
        received[target] += count
    return tuple(sent), tuple(received)
