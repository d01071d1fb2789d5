"""Plans as tables for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from autodist.cli.plans import Plan, VariablePlan
from autodist.strategies.table import ALL_WORKERS, MOST_NAMES, NARROW, readable_bytes

MOST_LINKS = 12
"""In the table of links, those that carry most; the others are counted."""


def tables_of(plans: Sequence[Plan], width: int) -> Iterator[Table]:
    """One plan by variables, workers and links; of several, variables and workers side by side.

    Args:
        plans: of the same step.
        width: columns of the terminal.
    """
    if len(plans) == 1:
        yield _variables(plans[0], width)
        yield _workers(plans[0])
        if plans[0].links:
            yield _links(plans[0])
        return
    yield side_by_side(plans, {variable.name: None for plan in plans for variable in plan.variables})
    yield _totals(plans)


def side_by_side(plans: Sequence[Plan], names: Sequence[str] | dict[str, None], heads: Sequence[str] = ()) -> Table:
    """What plans say of variables: a column for each plan.

    Args:
        plans: of one step.
        names: of the variables.
        heads: of the columns; by default the plans' strategies.
    """
    columns = heads or [plan.strategy for plan in plans]
    table = _table("variables", ["variable", *columns], lines=True)
    found = [{variable.name: variable for variable in plan.variables} for plan in plans]
    for name in names:
        here = [by_name.get(name) for by_name in found]
        about = next(variable for variable in here if variable is not None)
        first = f"{name}\n{shape_text(about.shape)}, {readable_bytes(about.bytes)}, {about.gradient}"
        table.add_row(Text(first), *(Text("–" if v is None else how(v)) for v in here))
    return table


def how(variable: VariablePlan) -> str:
    """How a variable is kept and synchronised, where, and what it costs, in three lines."""
    return f"{variable.synchronizer}\n{where(variable)}\n{cost(variable)}"


def where(variable: VariablePlan) -> str:
    """Who holds a variable, or its shards."""
    owners = Counter(shard.owner or ALL_WORKERS for shard in variable.shards)
    if variable.axis is None:
        return next(iter(owners))
    shards = f"{len(variable.shards)} shards of axis {variable.axis}"
    if len(owners) > MOST_NAMES:
        return f"{shards} at {len(owners)} workers"
    if max(owners.values()) == 1 or len(owners) == 1:
        return f"{shards} at {', '.join(owners)}"
    return f"{shards}: {', '.join(f'{count} at {name}' for name, count in owners.items())}"


def cost(variable: VariablePlan) -> str:
    """Bytes that workers send for a variable in a step."""
    counts = [count for count in variable.sent if count] or [0]
    told = readable_bytes(min(counts))
    if min(counts) != max(counts):
        told += f" to {readable_bytes(max(counts))}"
    if variable.gradient == "sparse":
        told += " + rows" if variable.rows is None else f" for {variable.rows} rows"
    return told


def shape_text(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "scalar"


def _variables(plan: Plan, width: int) -> Table:
    title = f"{plan.strategy}: {plan.replicas} replicas on {len(plan.workers)} workers"
    is_narrow = width < NARROW
    if is_narrow:
        table = _table(title, ["variable", "how and where", "slots"], lines=True)
    else:
        heads = ["variable", "shape", "bytes", "gradient", "synchronizer", "where", "slots", "sent a step"]
        table = _table(title, heads, right={"bytes", "sent a step"})
    for v in plan.variables:
        cells = [v.name, shape_text(v.shape), readable_bytes(v.bytes), v.gradient, v.synchronizer, where(v)]
        narrow = [f"{v.name}\n{', '.join(cells[1:4])}", how(v), _slots(v)]
        table.add_row(*map(Text, narrow if is_narrow else [*cells, _slots(v), cost(v)]))
    return table


def _slots(variable: VariablePlan) -> str:
    """How many slots a variable has, and their bytes."""
    if not variable.slots:
        return "none"
    return f"{len(variable.slots)}: {readable_bytes(sum(slot.bytes for slot in variable.slots))}"


def _workers(plan: Plan) -> Table:
    counts = {"replicas", "sends a step", "receives", "holds", "FLOPs a step"}
    rows = " + rows" if plan.rows_are_missing else ""
    table = _table("workers", ["worker", "replicas", "sends a step", "receives", "holds", "FLOPs a step"], right=counts)
    table.caption = Text(plan.sums) if plan.sums else None
    for w in plan.workers:
        sent, received = (readable_bytes(count) + rows for count in (w.sent, w.received))
        table.add_row(*map(Text, [w.name, str(w.replicas), sent, received, readable_bytes(w.held), flops(w.flops)]))
    return table


def _links(plan: Plan) -> Table:
    table = _table("links", ["from", "to", "bytes a step"], right={"bytes a step"})
    most = sorted(plan.links, key=lambda link: -link.bytes)[:MOST_LINKS]
    for link in most:
        table.add_row(*map(Text, [link.source, link.target, readable_bytes(link.bytes)]))
    if len(most) < len(plan.links):
        table.add_row(*map(Text, [f"{len(plan.links) - len(most)} others", "", "no more each"]))
    return table


def _totals(plans: Sequence[Plan]) -> Table:
    table = _table("a worker at most", ["", *(plan.strategy for plan in plans)])
    rows = [" + rows" if plan.rows_are_missing else "" for plan in plans]
    sent = [readable_bytes(max(w.sent for w in plan.workers)) + row for plan, row in zip(plans, rows, strict=True)]
    received = [readable_bytes(max(w.received for w in p.workers)) + row for p, row in zip(plans, rows, strict=True)]
    links = [readable_bytes(max((link.bytes for link in plan.links), default=0)) for plan in plans]
    held = [readable_bytes(max(w.held for w in plan.workers)) for plan in plans]
    computed = [flops(plan.workers[0].flops) for plan in plans]
    for head, cells in (
        ("sends a step", sent),
        ("receives", received),
        ("on one link", links),
        ("holds", held),
        ("FLOPs a step", computed),
    ):
        table.add_row(*map(Text, [head, *cells]))
    return table


def flops(count: int | None) -> str:
    """FLOPs with three digits that count.

    >>> flops(1_234_567), flops(12), flops(None)
    ('1.23 M', '12', 'not known')
    """
    if count is None:
        return "not known"
    size, unit = float(count), ""
    for larger in ("k", "M", "G", "T", "P"):
        if size < 999.5:
            break
        size, unit = size / 1000, f" {larger}"
    return f"{count}" if not unit else f"{size:.{2 if size < 9.995 else 1 if size < 99.95 else 0}f}{unit}"


def _table(title: str, heads: Sequence[str], right: set[str] | None = None, lines: bool = False) -> Table:
    table = Table(title=Text(title), title_justify="left", show_lines=lines)
    for head in heads:
        table.add_column(Text(head), justify="right" if head in (right or ()) else "left", overflow="fold")
    return table
