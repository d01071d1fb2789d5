"""Bytes that travel between workers in one step, by formula."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autodist.proto import strategy_pb2
from autodist.strategies.variables import SyncedVariable

INDEX_BYTES = 8
"""Of a row's index in a sparse gradient (int64; TensorFlow has int32 too, where it is half)."""


@dataclass(frozen=True)
class Traffic:
    """What one variable makes workers send in a step; they receive as much in sum.

    Attributes:
        by_owner: bytes that the owner sends; the same as `by_worker` where all workers are alike.
        by_worker: bytes that every other worker sends.
        per_row: whether both are for one row that every worker touches. How many rows a step touches is known
            only while it runs.
    """

    by_owner: int
    by_worker: int
    per_row: bool = False


def traffic(variable: SyncedVariable, node: strategy_pb2.VariableNode, workers: int) -> Traffic:
    """What one variable makes workers send in a step, with b its bytes and W the workers.

    | gradient | synchronizer | the owner sends | each other worker sends |
    |---|---|---|---|
    | dense | all-reduce | 2·b·(W-1)/W | 2·b·(W-1)/W |
    | dense | parameter server | b·(W-1), values | b, gradients |
    | sparse, a row of r bytes and its index of i | all-reduce (gathered) | (r+i)·(W-1) | (r+i)·(W-1) |
    | the same | parameter server | r·(W-1), values | r+2·i: the gradient, and what row to read |

    A sparse variable that the step also reads whole costs its whole size besides. Replicas of one worker share
    what it sends.

    Sources: P. Patarasuk and X. Yuan 2009 (see AllReduce); S. Kim et al., "Parallax", EuroSys 2019.
    """
    others = workers - 1
    if others < 1:
        return Traffic(0, 0, variable.is_sparse)
    served = node.HasField("parameter_server")
    if variable.is_sparse:
        row = variable.row_bytes
        gathered = (row + INDEX_BYTES) * others
        return Traffic(row * others, row + 2 * INDEX_BYTES, True) if served else Traffic(gathered, gathered, True)
    if served:
        return Traffic(variable.byte_size * others, variable.byte_size)
    reduced = round(2 * variable.byte_size * others / workers)
    return Traffic(reduced, reduced)


def dense_bytes_sent(
    variables: Iterable[SyncedVariable], nodes: Iterable[strategy_pb2.VariableNode], workers: int
) -> tuple[int, ...]:
    """Bytes that each worker sends in a step for all dense variables together."""
    by_name = {variable.name: variable for variable in variables}
    sent = [0] * workers
    for node in nodes:
        variable = by_name[node.variable]
        if variable.is_sparse:
            continue
        cost = traffic(variable, node, workers)
        owner = node.parameter_server.owner if node.HasField("parameter_server") else None
        for worker in range(workers):
            sent[worker] += cost.by_owner if worker == owner else cost.by_worker
    return tuple(sent)
