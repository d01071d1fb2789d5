"""Renders plans as tables for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from autodist.cli.plans import PlannedStrategy, VariablePlan
from autodist.graph.partial_count import PartialCount
from autodist.logs.formatting import listed, readable_bytes, readable_flops
from autodist.strategies.stage_table import bytes_text, stage_tables
from autodist.strategies.table import ALL_WORKERS, MOST_NAMES, NARROW

MOST_LINKS = 12
"""Number of links shown: those with the most bytes. The others are counted."""


def tables_of(plans: Sequence[PlannedStrategy], width: int) -> Iterator[Table]:
    """Yields the tables of one plan (variables, workers, links), or of several plans side by side.

    Args:
        plans: of the same step.
        width: columns of the terminal.
    """
    if len(plans) == 1:
        yield _variables(plans[0], width)
        yield _workers(plans[0])
        if plans[0].pipeline is not None:
            yield from stage_tables(plans[0].pipeline)
        if plans[0].links:
            yield _links(plans[0])
        return
    yield side_by_side(plans, {variable.name: None for plan in plans for variable in plan.variables})
    yield _totals(plans)


def side_by_side(
    plans: Sequence[PlannedStrategy], names: Sequence[str] | dict[str, None], heads: Sequence[str] = ()
) -> Table:
    """Returns a table of variables with a column for each plan.

    Args:
        plans: of one step.
        names: of the variables.
        heads: of the columns; by default the plans' strategies.
    """
    columns = heads or [plan.strategy for plan in plans]
    table = _table(f"variables{_of(plans[0].step)}", ["variable", *columns], lines=True)
    found = [{variable.name: variable for variable in plan.variables} for plan in plans]
    for name in names:
        here = [by_name.get(name) for by_name in found]
        about = next(variable for variable in here if variable is not None)
        first = f"{name}\n{shape_text(about.shape)}, {readable_bytes(about.bytes)}, {about.gradient}"
        table.add_row(Text(first), *(Text("–" if v is None else how(v)) for v in here))
    return table


def how(variable: VariablePlan) -> str:
    """Describes the synchronizer, the placement and the cost of a variable, in three lines."""
    return f"{variable.synchronizer}\n{where(variable)}\n{cost(variable)}"


def where(variable: VariablePlan) -> str:
    """Names the workers that hold a variable, or its shards."""
    owners = Counter(listed((shard.owner or ALL_WORKERS, *shard.mates)) for shard in variable.shards)
    if variable.axis is None:
        return next(iter(owners))
    shards = f"{len(variable.shards)} shards of axis {variable.axis}"
    if len(owners) > MOST_NAMES:
        return f"{shards} at {len(owners)} workers"
    if max(owners.values()) == 1 or len(owners) == 1:
        return f"{shards} at {', '.join(owners)}"
    return f"{shards}: {', '.join(f'{count} at {name}' for name, count in owners.items())}"


def cost(variable: VariablePlan) -> str:
    """Formats the bytes that workers send for a variable in a step."""
    counts = [count for count in variable.sent if count] or [0]
    text = readable_bytes(min(counts))
    if min(counts) != max(counts):
        text += f" to {readable_bytes(max(counts))}"
    if variable.gradient == "sparse":
        text += " + rows" if variable.rows is None else f" for {variable.rows} rows"
    return text


def shape_text(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "scalar"


def _variables(plan: PlannedStrategy, width: int) -> Table:
    is_narrow = width < NARROW
    if is_narrow:
        table = _table(plan.title, ["variable", "how and where", "slots"], lines=True)
    else:
        heads = ["variable", "shape", "bytes", "gradient", "synchronizer", "where", "slots", "sent a step"]
        table = _table(plan.title, heads, right={"bytes", "sent a step"})
    for v in plan.variables:
        cells = [v.name, shape_text(v.shape), readable_bytes(v.bytes), v.gradient, v.synchronizer, where(v)]
        narrow = [f"{v.name}\n{', '.join(cells[1:4])}", how(v), _slots(v)]
        table.add_row(*map(Text, narrow if is_narrow else [*cells, _slots(v), cost(v)]))
    return table


def _slots(variable: VariablePlan) -> str:
    """Formats the number of a variable's slots and their bytes."""
    if not variable.slots:
        return "none"
    return f"{len(variable.slots)}: {readable_bytes(sum(slot.bytes for slot in variable.slots))}"


def _workers(plan: PlannedStrategy) -> Table:
    counts = {"replicas", "sends a step", "receives", "holds", "FLOPs a step"}
    rows = " + rows" if plan.rows_are_missing else ""
    table = _table("workers", ["worker", "replicas", "sends a step", "receives", "holds", "FLOPs a step"], right=counts)
    table.caption = Text(plan.sums) if plan.sums else None
    for w in plan.workers:
        sent, received = (readable_bytes(count) + rows for count in (w.sent, w.received))
        table.add_row(
            *map(Text, [w.name, str(w.replicas), sent, received, readable_bytes(w.held), readable_flops(w.flops)])
        )
    return table


def _links(plan: PlannedStrategy) -> Table:
    table = _table("links", ["from", "to", "bytes a step"], right={"bytes a step"})
    most = sorted(plan.links, key=lambda link: -link.bytes)[:MOST_LINKS]
    for link in most:
        table.add_row(*map(Text, [link.source, link.target, bytes_text(PartialCount(link.bytes, link.is_least))]))
    if len(most) < len(plan.links):
        table.add_row(*map(Text, [f"{len(plan.links) - len(most)} others", "", "no more each"]))
    return table


def _of(step: str) -> str:
    return f" of {step}" if step else ""


def _totals(plans: Sequence[PlannedStrategy]) -> Table:
    table = _table(f"a worker at most{_of(plans[0].step)}", ["", *(plan.strategy for plan in plans)])
    rows = [" + rows" if plan.rows_are_missing else "" for plan in plans]
    sent = [readable_bytes(max(w.sent for w in plan.workers)) + row for plan, row in zip(plans, rows, strict=True)]
    received = [readable_bytes(max(w.received for w in p.workers)) + row for p, row in zip(plans, rows, strict=True)]
    links = [readable_bytes(max((link.bytes for link in plan.links), default=0)) for plan in plans]
    held = [readable_bytes(max(w.held for w in plan.workers)) for plan in plans]
    computed = [readable_flops(_most_flops(plan)) for plan in plans]
    for head, cells in (
        ("sends a step", sent),
        ("receives", received),
        ("on one link", links),
        ("holds", held),
        ("FLOPs a step", computed),
    ):
        table.add_row(*map(Text, [head, *cells]))
    return table


def _most_flops(plan: PlannedStrategy) -> int | None:
    """Returns the FLOPs of the worker that computes most; None if they are not known for all workers."""
    counts = [worker.flops for worker in plan.workers]
    return None if None in counts else max(count for count in counts if count is not None)


def _table(title: str, heads: Sequence[str], right: set[str] | None = None, lines: bool = False) -> Table:
    table = Table(title=Text(title), title_justify="left", show_lines=lines)
    for head in heads:
        table.add_column(Text(head), justify="right" if head in (right or ()) else "left", overflow="fold")
    return table
