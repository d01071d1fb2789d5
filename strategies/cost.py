"""Estimates the bytes that each worker sends in one step, by formula."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autodist.proto import strategy_pb2
from autodist.strategies.nodes import distinct_shards
from autodist.strategies.variables import SyncedVariable
from autodist.synchronizers import Sent, partitioning_of
from autodist.synchronizers.traffic import INDEX_BYTES


@dataclass(frozen=True)
class Traffic:
    """The bytes that one variable makes each worker send; in total, workers receive as many.

    Attributes:
        step: bytes by worker in a step, independent of the number of touched rows.
        row: additional bytes by worker for one row of a sparse variable that every worker touches. The number of rows
            is only known when a step runs. For a variable partitioned along its rows, the mean over all rows.
    """

    step: tuple[int, ...]
    row: tuple[int, ...]


def traffic(variable: SyncedVariable, node: strategy_pb2.VariableNode, config: strategy_pb2.GraphConfig) -> Traffic:
    """Computes the bytes that one variable makes workers send; b: its bytes, W: the number of workers with replicas.

    | gradient | synchronizer | the owner sends | each other worker with replicas sends |
    |---|---|---|---|
    | dense | all-reduce | 2·b·(W-1)/W | 2·b·(W-1)/W |
    | dense | the same, compressed | with b from `Compressor.bytes_of` | with b from `Compressor.bytes_of` |
    | dense | the same, if compressed values cannot be summed (`goes_to_all`) | b·(W-1) | b·(W-1) |
    | dense | parameter server | b·(W-1), values | b, gradients |
    | sparse, a row of r bytes and its index of i | all-reduce (gathered) | (r+i)·(W-1) | (r+i)·(W-1) |
    | the same | parameter server | r·(W-1), values | r+2·i: the gradient, and the index of the row to read |
    | the same | parameter server with proxies | b·(W-1) a step, values | r+i |

    An owner without replicas sends to W workers instead of W-1. A proxy of a dense variable costs nothing more, since
    a step fetches its value once anyway. A gradient that a compressor would not shrink is sent uncompressed. Each shard
    of a partitioned variable counts separately. A sparse variable that the step also reads in full additionally costs
    its whole size. Replicas of one worker share its messages.

    Sources: P. Patarasuk and X. Yuan 2009 (see AllReduce); S. Kim et al., "Parallax", EuroSys 2019.
    """
    step, row = sent_for(variable, node, computing_workers(config))
    workers = worker_count(config)
    return Traffic(step.by_worker(workers), row.by_worker(workers))


def sent_for(variable: SyncedVariable, node: strategy_pb2.VariableNode, computing: frozenset[int]) -> tuple[Sent, Sent]:
    """Computes the traffic of a variable before expansion by worker: bytes of a step, and additional bytes per row.

    Args:
        variable: of the captured step.
        node: its placement and synchronisation.
        computing: the workers that have replicas.
    """
    cut = partitioning_of(node)
    # A row lies in one shard of a cut along axis 0, and in every shard of another cut.
    is_shared = cut is not None and cut.axis == 0
    step, row = Sent(computing), Sent(computing, max(variable.shape[0], 1) if is_shared else 1)
    for piece, synchronizer, count in distinct_shards(variable, node):
        share = piece.shape[0] if is_shared else 1
        if count == 1:
            synchronizer.add_traffic(piece, share, step, row)
            continue
        one_step, one_row = Sent(computing), Sent(computing)
        synchronizer.add_traffic(piece, share, one_step, one_row)
        step.add_times(one_step, count)
        row.add_times(one_row, count)
    return step, row


def sent_in_stage_group(variable: SyncedVariable, holders: Sequence[int]) -> tuple[Sent, Sent]:
    """Like `sent_for`, for a variable that the workers of a pipeline stage hold: each sends its part to all others."""
    step, row = Sent(frozenset()), Sent(frozenset())
    for holder in holders:
        if variable.is_sparse:
            row.add(0, holder, (variable.row_bytes + INDEX_BYTES) * (len(holders) - 1))
        else:
            step.add(0, holder, variable.byte_size * (len(holders) - 1))
    return step, row


def bytes_sent(
    variables: Iterable[SyncedVariable],
    nodes: Iterable[strategy_pb2.VariableNode],
    config: strategy_pb2.GraphConfig,
) -> tuple[int, ...]:
    """Returns the bytes that each worker sends in a step for all variables together, without touched rows."""
    by_name = {variable.name: variable for variable in variables}
    computing = computing_workers(config)
    total = Sent(computing)
    for node in nodes:
        total.add_times(sent_for(by_name[node.variable], node, computing)[0].whole(), 1)
    return total.by_worker(worker_count(config))


def worker_count(config: strategy_pb2.GraphConfig) -> int:
    """Returns the number of workers, including those without replicas."""
    return config.workers or len(computing_workers(config))


def computing_workers(config: strategy_pb2.GraphConfig) -> frozenset[int]:
    """Returns the indices of the workers that have replicas."""
    return frozenset(replica.worker for replica in config.replicas)
