"""Estimates the bytes that each worker sends in one step, and to which other workers, by formula."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import lcm

from autodist.placement.group import Group, worker_count
from autodist.proto import strategy_pb2
from autodist.strategies.nodes import distinct_shards, whole_node
from autodist.strategies.variables import SyncedVariable
from autodist.synchronizers import Sent, Subgroups, Synchronizer, partitioning_of
from autodist.synchronizers.traffic import INDEX_BYTES

Link = tuple[int, int]
"""The sending and the receiving worker."""


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
    | dense | the same, gathered with its layer | 2·b·(W-1), values | b, gradients |
    | sparse, a row of r bytes and its index of i | all-reduce (gathered) | (r+i)·(W-1) | (r+i)·(W-1) |
    | the same | parameter server | r·(W-1), values | r+2·i: the gradient, and the index of the row to read |
    | the same | parameter server with proxies | b·(W-1) a step, values | r+i |

    An owner without replicas sends to W workers instead of W-1. A proxy of a dense variable costs nothing more, since
    a step fetches its value once anyway. A gradient that a compressor would not shrink is sent uncompressed. Each shard
    of a partitioned variable counts separately. A sparse variable that the step also reads in full additionally costs
    its whole size. Replicas of one worker share its messages. A layer that is gathered only once counts twice.

    Sources: P. Patarasuk and X. Yuan 2009 (see AllReduce); S. Kim et al., "Parallax", EuroSys 2019.
    """
    step, row = sent_for(variable, node, Group.of_run(config))
    workers = worker_count(config)
    return Traffic(step.by_worker(workers), row.by_worker(workers))


def sent_for(variable: SyncedVariable, node: strategy_pb2.VariableNode, group: Group) -> tuple[Sent, Sent]:
    """Computes the traffic of a variable before expansion by worker: bytes of a step, and additional bytes per row.

    Args:
        variable: a variable of the captured step.
        node: its placement and synchronisation.
        group: the replicas.
    """
    partitioning = partitioning_of(node)
    # A row lies in one shard of a partitioning along axis 0, and in every shard of another partitioning.
    is_shared = partitioning is not None and partitioning.axis == 0
    step, row = Sent(), Sent(max(variable.shape[0], 1) if is_shared else 1)
    for piece, synchronizer, count in distinct_shards(variable, node):
        share = piece.shape[0] if is_shared else 1
        if count == 1:
            synchronizer.add_traffic(piece, group, share, step, row)
            continue
        one_step, one_row = Sent(), Sent()
        synchronizer.add_traffic(piece, group, share, one_step, one_row)
        step.add_times(one_step, count)
        row.add_times(one_row, count)
    return step, row


def sent_in_stage_group(variable: SyncedVariable, group: Group) -> tuple[Sent, Sent]:
    """Like `sent_for`, for a variable that the workers of a pipeline stage hold: each sends its part to all others."""
    step, row, others = Sent(), Sent(), len(group.workers) - 1
    if variable.is_sparse:
        row.add(group, (variable.row_bytes + INDEX_BYTES) * others)
    else:
        step.add(group, variable.byte_size * others)
    return step, row


def bytes_sent(
    variables: Iterable[SyncedVariable],
    nodes: Iterable[strategy_pb2.VariableNode],
    config: strategy_pb2.GraphConfig,
) -> tuple[int, ...]:
    """Returns the bytes that each worker sends in a step for all variables together, without touched rows."""
    by_name = {variable.name: variable for variable in variables}
    group, total = Group.of_run(config), Sent()
    for node in nodes:
        total.add_times(sent_for(by_name[node.variable], node, group)[0].whole(), 1)
    return total.by_worker(worker_count(config))


def link_bytes(
    variable: SyncedVariable, node: strategy_pb2.VariableNode, config: strategy_pb2.GraphConfig, rows: int = 0
) -> dict[Link, int]:
    """Computes the bytes a step that one variable makes each worker send to each other; unused links are left out.

    The bytes that a worker sends (`traffic`) go to a parameter server's owner, or from there to all other workers in
    equal parts. All-reduce by SHUFFLE, and gathered rows, go to all other workers in equal parts. RING and NCCL send
    everything to the next worker; HIERARCHICAL sends to its subgroup and to workers of others (`Subgroups.shares`).

    Args:
        variable: a variable of the captured step.
        node: its placement and synchronisation.
        config: the configuration of a strategy with resolved specs.
        rows: the number of rows of a sparse variable that each worker touches in a step.
    """
    partitioning, group = partitioning_of(node), Group.of_run(config)
    computing, subgroups = len(group.workers), Subgroups.of(config.subgroups, group)
    is_shared = partitioning is not None and partitioning.axis == 0
    indices = max(variable.shape[0], 1) if is_shared else 1
    # Integer parts of a byte: fractions would take ten times as long, for a number of links quadratic in workers.
    parts = lcm(indices, *range(max(computing - 1, 1), computing + 1))
    sent: dict[Link, int] = {}
    for piece, synchronizer, count in distinct_shards(variable, node):
        share = piece.shape[0] if is_shared else 1
        cost = traffic(piece, whole_node(piece.name, synchronizer), config)
        for worker, (step, row) in enumerate(zip(cost.step, cost.row, strict=True)):
            if not (step or row):
                continue
            shares = _shares(synchronizer, piece, worker, group, subgroups)
            scaled = count * (step * parts + row * rows * share * (parts // indices))
            total = sum(shares.values())
            for target, part in shares.items():
                link = worker, target
                sent[link] = sent.get(link, 0) + scaled * part // total
    return {link: _nearest(count, parts) for link, count in sorted(sent.items()) if count}


def _shares(
    synchronizer: Synchronizer, piece: SyncedVariable, worker: int, group: Group, subgroups: Subgroups | None
) -> Mapping[int, int]:
    """Returns, by receiving worker, its proportion of the bytes that `worker` sends."""
    if subgroups is not None and synchronizer.uses_subgroups:
        return subgroups.shares(worker, piece.is_sparse or synchronizer.goes_to_all)
    return dict.fromkeys(synchronizer.targets(worker, group), 1)


def _nearest(count: int, parts: int) -> int:
    """Returns `count / parts` rounded to the nearest integer, ties to even."""
    whole, rest = divmod(count, parts)
    return whole + (2 * rest > parts or (2 * rest == parts and whole % 2))


def sums_by_worker(links: Mapping[Link, int], workers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the bytes that each worker sends to all others, and those that it receives from them."""
    sent, received = [0] * workers, [0] * workers
    for (source, target), count in links.items():
        sent[source] += count
        received[target] += count
    return tuple(sent), tuple(received)
