"""Formats a strategy as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from autodist.graph.pipeline_schedule import SCHEDULES, bubble, make_schedule
from autodist.logs.formatting import counted, listed, readable_bytes, readable_shape
from autodist.logs.tables import NARROW
from autodist.placement.group import Group, worker_count
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.cost import Traffic, sent_for, sent_in_stage_group
from autodist.strategies.mesh_table import mesh_tables, requested_figures
from autodist.strategies.nodes import distinct_shards
from autodist.strategies.specs import effective_spec, resolve_node
from autodist.strategies.sum_summary import sum_summary
from autodist.strategies.variables import GraphLike, SyncedVariable, synced_variables
from autodist.synchronizers import Sent, partitioning_of, stages_of, synchronizers_of

NUMBERS = {"bytes", "bytes a step and worker", "bytes a step\nand worker"}
COLUMNS = ("variable", "shape", "bytes", "gradient", "synchronizer", "where", "bytes a step and worker")
NARROW_COLUMNS = ("variable", "synchronizer", "bytes a step\nand worker")

ALL_WORKERS = "all workers"

MOST_NAMES = 4
"""Of owners in one cell; if there are more, their number is shown."""

MOST_ROWS = 50
"""Of variables, the largest; the others are summarised."""


def strategy_table(
    strategy: strategy_pb2.Strategy,
    graph_item: GraphLike,
    worker_names: Sequence[str] | None = None,
    width: int | None = None,
    held: Sequence[int] | None = None,
    rows: Mapping[str, int] | None = None,
    resource_spec: ResourceSpec | None = None,
) -> Table:
    """Builds a table of each variable's placement, synchronisation and cost, with a last row for the whole step.

    Of more than `MOST_ROWS` variables the largest have a row each; the others share one.

    Args:
        strategy: one that `check_strategy` accepts.
        graph_item: the captured step that it is for.
        worker_names: the names of the workers, in the order of their indices. Default: "worker 0", "worker 1" and so
            on.
        width: the columns of the terminal; None: unlimited.
        held: bytes of all variables that each worker holds, including optimizer slots. Default: bytes of the variables
            that have a gradient.
        rows: number of rows that a worker's part of the first batch touches, by sparse variable, if known. The table
            then shows the cost of a step with that batch.
        resource_spec: the machines; if set, the table shows the time of sums according to the network model.
    """
    if strategy.HasField("mesh"):
        figures = requested_figures(strategy, graph_item)
        return next(mesh_tables(figures, f"{strategy.builder}: {figures.title}", width))
    config = strategy.graph_config
    workers = worker_count(config)
    names = worker_names or [f"worker {index}" for index in range(workers)]
    variables = {variable.name: variable for variable in synced_variables(graph_item)}
    costs = _costs(strategy, variables, rows or {})
    shown = _largest(costs)
    lines = [_row(strategy, one, names) for one in shown]
    total = _total(tuple(variables.values()), costs, names)
    smaller = counted(len(costs) - len(shown), "smaller variable") if len(shown) < len(costs) else ""
    if smaller:
        left = sum(one.variable.byte_size for one in costs) - sum(one.variable.byte_size for one in shown)
        lines.append((f"and {smaller}", "", readable_bytes(left), "", "", "", ""))
    is_narrow = width is not None and width < NARROW
    if is_narrow:
        lines, total = [_narrow(line) for line in lines], _narrow(total)
    if held is None:
        holds = _held(trained_bytes(strategy, graph_item), names, " of trained variables")
    else:
        holds = _held(held, names, "")
    # In the caption: a cell would widen its column.
    more = smaller and f"`autodist plan --json` lists the {smaller}"
    caption = "; ".join(filter(None, (holds, sum_summary(strategy, graph_item, resource_spec), more)))
    # Text, not markup: a variable's name may hold square brackets.
    table = Table(title=Text(_title(strategy, workers)), show_footer=True, caption=Text(caption), show_lines=is_narrow)
    for column, footer in zip(NARROW_COLUMNS if is_narrow else COLUMNS, total, strict=True):
        table.add_column(column, Text(footer), justify="right" if column in NUMBERS else "left", overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def _title(strategy: strategy_pb2.Strategy, workers: int) -> str:
    count = len(strategy.graph_config.replicas)
    if not strategy.pipeline.stages:
        return f"{strategy.builder}: {counted(count, 'replica')} on {counted(workers, 'worker')}"
    stages, schedule = len(strategy.pipeline.stages), SCHEDULES[strategy.pipeline.schedule]
    pipelines = stages_of(strategy).pipelines
    count //= pipelines
    waits = round(100 * bubble(make_schedule(stages, count, schedule)))
    parallel = f"{pipelines} pipelines of " if pipelines > 1 else ""
    parts = f"{parallel}{counted(stages, 'stage')}, {counted(count, 'micro-batch')} by {schedule}"
    return f"{strategy.builder}: {parts}; a worker waits {waits} % of a step, if stages take equally long"


@dataclass(frozen=True)
class _Cost:
    """The bytes that one variable makes workers send.

    Attributes:
        variable: the variable.
        node: its node in the strategy.
        step: the bytes in a step.
        row: the bytes for one row.
        touched: the number of touched rows; 0 if not known.
    """

    variable: SyncedVariable
    node: strategy_pb2.VariableNode
    step: Sent
    row: Sent
    touched: int


def _costs(
    strategy: strategy_pb2.Strategy, variables: Mapping[str, SyncedVariable], rows: Mapping[str, int]
) -> list[_Cost]:
    if strategy.pipeline.stages:
        return [_cost_in_pipeline(strategy, variables[node.variable], node, rows) for node in strategy.nodes]
    group = Group.of_run(strategy.graph_config)
    return [
        _Cost(variable, node, *sent_for(variable, node, group), rows.get(variable.name, 0))
        for node in strategy.nodes
        for variable in [variables[node.variable]]
    ]


def _cost_in_pipeline(
    strategy: strategy_pb2.Strategy,
    variable: SyncedVariable,
    node: strategy_pb2.VariableNode,
    rows: Mapping[str, int],
) -> _Cost:
    """Returns the cost of a variable in a pipeline: only its holders exchange its gradient."""
    group = stages_of(strategy).group_of(node.parameter_server.owner)
    touched = -(-rows.get(variable.name, 0) // group.size)
    return _Cost(variable, node, *sent_in_stage_group(variable, group), touched)


def _largest(costs: Sequence[_Cost]) -> list[_Cost]:
    """Returns the costs of the largest variables, in the original order; thousands of rows would be unreadable."""
    if len(costs) <= MOST_ROWS:
        return list(costs)
    ordered = sorted(range(len(costs)), key=lambda index: -costs[index].variable.byte_size)
    return [costs[index] for index in sorted(ordered[:MOST_ROWS])]


def trained_bytes(strategy: strategy_pb2.Strategy, graph_item: GraphLike) -> tuple[int, ...]:
    """Returns the bytes of the variables with a gradient that each worker holds, without optimizer slots."""
    variables = {variable.name: variable for variable in synced_variables(graph_item)}
    everywhere, owned = 0, [0] * worker_count(strategy.graph_config)
    stages = stages_of(strategy)
    for node in strategy.nodes:
        for piece, part, count in distinct_shards(variables[node.variable], node):
            if part.owner is None or part.has_cached_copy:
                everywhere += piece.byte_size * count
            else:
                for holder in stages.group_of(part.owner).workers:
                    owned[holder] += piece.byte_size * count
    return tuple(everywhere + one for one in owned)


def _held(held: Sequence[int], names: Sequence[str], of: str) -> str:
    if not held:
        return ""
    if len(set(held)) == 1:
        return f"each worker holds {readable_bytes(held[0])}{of}"
    if len(held) <= MOST_NAMES:
        by_worker = ", ".join(f"{name} {readable_bytes(count)}" for name, count in zip(names, held, strict=True))
        return f"held{of}: {by_worker}"
    most = max(range(len(held)), key=lambda worker: held[worker])
    return f"workers hold {readable_bytes(min(held))} to {readable_bytes(held[most])}{of}, most {names[most]}"


def _narrow(cells: tuple[str, ...]) -> tuple[str, ...]:
    """Converts a row of the wide table to three cells of up to two lines."""
    name, shape, size, kind, synchronizer, where, cost = cells
    about = ", ".join(part for part in (shape, size, kind) if part)
    return f"{name}\n{about}", "\n".join(part for part in (synchronizer, where) if part), cost


def _row(strategy: strategy_pb2.Strategy, cost: _Cost, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the cells of one variable, in the order of `COLUMNS`."""
    variable, node = cost.variable, resolve_node(cost.node, effective_spec(strategy))
    if strategy.pipeline.stages:
        stages, owner = stages_of(strategy), node.parameter_server.owner
        synchronizer = f"stage {stages.stage_of(owner)}"
        where = listed([names[worker] for worker in stages.group_of(owner).workers])
    else:
        synchronizer, where = synchronizer_text(node), _where(node, names)
    kind = "sparse" if variable.is_sparse else "dense"
    sent = Traffic(cost.step.by_worker(len(names)), cost.row.by_worker(len(names)))
    size = readable_bytes(variable.byte_size)
    return (
        variable.name,
        readable_shape(variable.shape),
        size,
        kind,
        synchronizer,
        where,
        _cost(sent, node, cost.touched),
    )


def synchronizer_text(node: strategy_pb2.VariableNode) -> str:
    """Describes the synchronizers of the shards, each distinct one once."""
    ways: dict[str, list[int]] = {}
    for one in synchronizers_of(node):
        ways.setdefault(one.text, []).extend([] if one.group is None else [one.group])
    return "; ".join(way + _groups(groups) for way, groups in ways.items())


def _groups(groups: Sequence[int]) -> str:
    if not groups:
        return ""
    first, last = min(groups), max(groups)
    return f", group {first}" if first == last else f", groups {first} to {last}"


def _where(node: strategy_pb2.VariableNode, names: Sequence[str]) -> str:
    """Returns the workers that hold the variable; of a partitioned one, the number of shards of each owner."""
    by_owner = Counter(one.owner for one in synchronizers_of(node))
    in_order = sorted(by_owner, key=lambda owner: -1 if owner is None else owner)
    owners = {ALL_WORKERS if owner is None else names[owner]: by_owner[owner] for owner in in_order}
    partitioning = partitioning_of(node)
    return owners_text(owners, None if partitioning is None else partitioning.axis)


def owners_text(owners: Mapping[str, int], axis: int | None) -> str:
    """Describes the owners of a variable.

    >>> owners_text({"all workers": 1}, None), owners_text({"a": 2, "b": 1}, 0)
    ('all workers', '3 shards of axis 0: 2 at a, 1 at b')

    Args:
        owners: the number of shards of each owner, by its name.
        axis: the axis along which the variable is partitioned; None: it is whole.
    """
    if axis is None:
        return next(iter(owners))
    shards = f"{counted(sum(owners.values()), 'shard')} of axis {axis}"
    if len(owners) > MOST_NAMES:
        return f"{shards} at {len(owners)} workers"
    if len(owners) == 1 or max(owners.values()) == 1:
        return f"{shards} at {', '.join(owners)}"
    return f"{shards}: {', '.join(f'{count} at {name}' for name, count in owners.items())}"


def _cost(cost: Traffic, node: strategy_pb2.VariableNode, touched: int) -> str:
    """Formats the bytes that a worker sends in a step, and for the touched rows of the first batch or for a row."""
    owner = None if partitioning_of(node) else synchronizers_of(node)[0].owner
    parts = [_spread(cost.step, owner, "")] if any(cost.step) or not any(cost.row) else []
    if any(cost.row) and touched:
        parts.append(_spread([count * touched for count in cost.row], owner, f" for {counted(touched, 'row')}"))
    elif any(cost.row):
        parts.append(_spread(cost.row, owner, " a row"))
    return " + ".join(parts)


def _spread(sent: Sequence[int], owner: int | None, unit: str) -> str:
    """Formats bytes by worker: one figure if all are equal, else the owner's separately, else the range."""
    counts = {worker: count for worker, count in enumerate(sent) if count} or {0: 0}
    others = {count for worker, count in counts.items() if worker != owner}
    if owner is not None and sent[owner] and not others:
        return f"owner {readable_bytes(sent[owner])}{unit}"
    if len(set(counts.values())) == 1:
        return f"{readable_bytes(next(iter(counts.values())))}{unit}"
    if owner is not None and len(others) == 1:
        return f"{readable_bytes(*others)}{unit}, owner {readable_bytes(sent[owner])}"
    return f"{readable_bytes(min(counts.values()))} to {readable_bytes(max(counts.values()))}{unit}"


def _total(variables: Sequence[SyncedVariable], costs: Sequence[_Cost], names: Sequence[str]) -> tuple[str, ...]:
    """Returns the last row: all variables together, and the worker that sends most."""
    size = readable_bytes(sum(variable.byte_size for variable in variables))
    total, is_open = Sent(), False
    for cost in costs:
        row = cost.row.whole()
        total.add_times(cost.step.whole(), 1)
        total.add_times(row, cost.touched)
        is_open |= bool(row) and not cost.touched
    sent = total.by_worker(len(names))
    most = max(range(len(sent)), key=lambda worker: sent[worker])
    where = ALL_WORKERS if len(set(sent)) == 1 else f"most at {names[most]}"
    rows = " + rows" if is_open else ""
    return counted(len(variables), "variable"), "", size, "", "", where, f"{readable_bytes(sent[most])}{rows}"
