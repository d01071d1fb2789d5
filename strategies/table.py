"""The strategy as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from autodist.proto import strategy_pb2
from autodist.strategies.cost import Traffic, dense_bytes_sent, traffic
from autodist.strategies.specs import resolve_specs
from autodist.strategies.variables import GraphLike, SyncedVariable, synced_variables

NUMBERS = {"bytes", "bytes a step and worker"}
COLUMNS = ("variable", "shape", "bytes", "gradient", "synchronizer", "where", "bytes a step and worker")

_UNITS = ("kB", "MB", "GB", "TB")


def strategy_table(
    strategy: strategy_pb2.Strategy, graph_item: GraphLike, worker_names: Sequence[str] | None = None
) -> Table:
    """How each variable is kept and synchronised, where, and what it costs; a last row for the whole step.

    Args:
        strategy: one that `check_strategy` passes.
        graph_item: the captured step that it is for.
        worker_names: in the order of their indices; without them owners are called "worker 1".
    """
    replicas = strategy.graph_config.replicas
    workers = len({replica.worker for replica in replicas})
    names = worker_names or [f"worker {index}" for index in range(workers)]
    variables = {variable.name: variable for variable in synced_variables(graph_item)}
    resolved = resolve_specs(strategy)
    title = f"{strategy.builder}: {_count(len(replicas), 'replica')} on {_count(workers, 'worker')}"
    # Text, not markup: a variable's name may hold square brackets.
    table = Table(title=Text(title), show_footer=True)
    total = _total(tuple(variables.values()), resolved, workers, names)
    for column, footer in zip(COLUMNS, total, strict=True):
        table.add_column(column, Text(footer), justify="right" if column in NUMBERS else "left", overflow="fold")
    for node in resolved.nodes:
        table.add_row(*map(Text, _row(variables[node.variable], node, workers, names)))
    return table


def _row(
    variable: SyncedVariable, node: strategy_pb2.VariableNode, workers: int, names: Sequence[str]
) -> tuple[str, ...]:
    if node.HasField("parameter_server"):
        synchronizer, where = "PS", names[node.parameter_server.owner]
    else:
        spec = strategy_pb2.AllReduce.Spec.Name(node.all_reduce.spec)
        synchronizer, where = f"AllReduce {spec}, group {node.all_reduce.group}", "all workers"
    shape = " × ".join(str(length) for length in variable.shape) or "scalar"
    kind = "sparse" if variable.is_sparse else "dense"
    cost = _cost(traffic(variable, node, workers))
    return variable.name, shape, readable_bytes(variable.byte_size), kind, synchronizer, where, cost


def _cost(cost: Traffic) -> str:
    unit = " a row" if cost.per_row else ""
    if cost.by_owner == cost.by_worker:
        return f"{readable_bytes(cost.by_worker)}{unit}"
    return f"{readable_bytes(cost.by_worker)}{unit}, owner {readable_bytes(cost.by_owner)}"


def _total(
    variables: Sequence[SyncedVariable], strategy: strategy_pb2.Strategy, workers: int, names: Sequence[str]
) -> tuple[str, ...]:
    """The last row: all variables together, and the worker that sends most."""
    size = readable_bytes(sum(variable.byte_size for variable in variables))
    sent = dense_bytes_sent(variables, strategy.nodes, workers)
    most = max(range(workers), key=lambda worker: sent[worker])
    where = "all workers" if len(set(sent)) == 1 else f"most at {names[most]}"
    rows = " + rows" if workers > 1 and any(variable.is_sparse for variable in variables) else ""
    return _count(len(variables), "variable"), "", size, "", "", where, f"{readable_bytes(sent[most])}{rows}"


def readable_bytes(count: int) -> str:
    """A number of bytes with three digits that count, in powers of 1000.

    >>> readable_bytes(1536), readable_bytes(40_000_000)
    ('1.54 kB', '40.0 MB')
    """
    if count < 1000:
        return f"{count} B"
    size, unit = count / 1000, _UNITS[0]
    for larger in _UNITS[1:]:
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    decimals = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{size:.{decimals}f} {unit}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
