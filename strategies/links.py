"""Bytes that go from each worker to each other in one step, by formula."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from autodist.proto import strategy_pb2
from autodist.strategies.cost import traffic, worker_count
from autodist.strategies.nodes import pieces, whole_node
from autodist.strategies.variables import SyncedVariable
from autodist.synchronizers import cut_of

Link = tuple[int, int]
"""The worker that sends and the one that receives."""


def link_bytes(
    variable: SyncedVariable, node: strategy_pb2.VariableNode, config: strategy_pb2.GraphConfig, rows: int = 0
) -> dict[Link, int]:
    """What one variable makes each worker send to each other, in bytes a step; links without any are left out.

    What a worker sends (`traffic`) goes to a parameter server's owner, or from there to all others alike. An all-reduce
    by SHUFFLE, and gathered rows, go to all others alike; RING and NCCL send all to the next worker.

    Args:
        variable: of the captured step.
        node: how it is kept and synchronised.
        config: of the strategy, with specs resolved.
        rows: of a sparse variable, that each worker touches in a step.
    """
    sent: dict[Link, Fraction] = {}
    cut, computing = cut_of(node), sorted({replica.worker for replica in config.replicas})
    for piece, synchronizer in pieces(variable, node):
        share = Fraction(1)
        if cut is not None and cut.axis == 0:
            share = Fraction(piece.shape[0], max(variable.shape[0], 1))
        cost = traffic(piece, whole_node(piece.name, synchronizer), config)
        for worker in range(worker_count(config)):
            count = cost.step[worker] + cost.row[worker] * share * rows
            targets = synchronizer.targets(worker, computing)
            for target in targets:
                sent[worker, target] = sent.get((worker, target), Fraction(0)) + Fraction(count) / len(targets)
    return {link: round(count) for link, count in sorted(sent.items()) if count}


def sums_by_worker(links: Mapping[Link, int], workers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What each worker sends to all others, and what it receives from them."""
    sent, received = [0] * workers, [0] * workers
    for (source, target), count in links.items():
        sent[source] += count
        received[target] += count
    return tuple(sent), tuple(received)
