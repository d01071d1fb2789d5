"""Renders plans as tables for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.table import Table

from autodist.cli.plans import PlannedStrategy, VariablePlan
from autodist.graph.partial_count import PartialCount
from autodist.logs.formatting import listed, readable_bytes, readable_flops, readable_shape
from autodist.logs.tables import text_table
from autodist.strategies.stage_table import bytes_text, stage_tables
from autodist.strategies.table import ALL_WORKERS, NARROW, owners_text

MOST_LINKS = 12
"""Number of links shown: those with the most bytes. The others are counted."""

WORKER_HEADS = ("worker", "replicas", "sends a step", "receives", "holds", "FLOPs a step")


def tables_of(plans: Sequence[PlannedStrategy], width: int) -> Iterator[Table]:
    """Yields the tables of one plan (variables, workers, links), or of several plans side by side.

    Args:
        plans: the plans of one step.
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
        plans: the plans of one step.
        names: the names of the variables.
        heads: the heads of the columns; by default the plans' strategies.
    """
    columns = heads or [plan.strategy for plan in plans]
    by_plan = [{variable.name: variable for variable in plan.variables} for plan in plans]
    rows = []
    for name in names:
        found = [by_name.get(name) for by_name in by_plan]
        about = next(variable for variable in found if variable is not None)
        first = f"{name}\n{readable_shape(about.shape)}, {readable_bytes(about.bytes)}, {about.gradient}"
        rows.append([first, *("–" if variable is None else _summary(variable) for variable in found)])
    return text_table(f"variables{_of(plans[0].step)}", ["variable", *columns], rows, has_lines=True)


def _summary(variable: VariablePlan) -> str:
    """Describes the synchronizer, the placement and the cost of a variable, in three lines."""
    return f"{variable.synchronizer}\n{where(variable)}\n{cost(variable)}"


def where(variable: VariablePlan) -> str:
    """Names the workers that hold a variable, or its shards."""
    owners = Counter(listed((shard.owner or ALL_WORKERS, *shard.mates)) for shard in variable.shards)
    return owners_text(owners, variable.axis)


def cost(variable: VariablePlan) -> str:
    """Formats the bytes that workers send for a variable in a step."""
    counts = [count for count in variable.sent if count] or [0]
    text = readable_bytes(min(counts))
    if min(counts) != max(counts):
        text += f" to {readable_bytes(max(counts))}"
    if variable.gradient == "sparse":
        text += " + rows" if variable.rows is None else f" for {variable.rows} rows"
    return text


def _variables(plan: PlannedStrategy, width: int) -> Table:
    if width < NARROW:
        narrow = [[f"{v.name}\n{', '.join(_properties(v))}", _summary(v), _slots(v)] for v in plan.variables]
        return text_table(plan.title, ["variable", "how and where", "slots"], narrow, has_lines=True)
    heads = ["variable", "shape", "bytes", "gradient", "synchronizer", "where", "slots", "sent a step"]
    rows = [[v.name, *_properties(v), v.synchronizer, where(v), _slots(v), cost(v)] for v in plan.variables]
    return text_table(plan.title, heads, rows, numbers=("bytes", "sent a step"))


def _properties(variable: VariablePlan) -> list[str]:
    return [readable_shape(variable.shape), readable_bytes(variable.bytes), variable.gradient]


def _slots(variable: VariablePlan) -> str:
    """Formats the number of a variable's slots and their bytes."""
    if not variable.slots:
        return "none"
    return f"{len(variable.slots)}: {readable_bytes(sum(slot.bytes for slot in variable.slots))}"


def _workers(plan: PlannedStrategy) -> Table:
    more = " + rows" if plan.rows_are_missing else ""
    rows = worker_rows(plan)
    for row in rows:
        row[2], row[3] = row[2] + more, row[3] + more
    return text_table("workers", WORKER_HEADS, rows, numbers=WORKER_HEADS[1:], caption=plan.sums)


def worker_rows(plan: PlannedStrategy) -> list[list[str]]:
    """Returns the rows under `WORKER_HEADS`, without the rows of sparse variables whose number is not known."""
    return [
        [w.name, str(w.replicas), *map(readable_bytes, (w.sent, w.received, w.held)), readable_flops(w.flops)]
        for w in plan.workers
    ]


def _links(plan: PlannedStrategy) -> Table:
    most = sorted(plan.links, key=lambda link: -link.bytes)[:MOST_LINKS]
    rows = [[link.source, link.target, bytes_text(PartialCount(link.bytes, link.is_least))] for link in most]
    if len(most) < len(plan.links):
        rows.append([f"{len(plan.links) - len(most)} others", "", "no more each"])
    return text_table("links", ["from", "to", "bytes a step"], rows, numbers=("bytes a step",))


def _of(step: str) -> str:
    return f" of {step}" if step else ""


def _totals(plans: Sequence[PlannedStrategy]) -> Table:
    heads = ("sends a step", "receives", "on one link", "holds", "FLOPs a step")
    rows = [[head, *cells] for head, *cells in zip(heads, *map(_most, plans), strict=True)]
    return text_table(f"a worker at most{_of(plans[0].step)}", ["", *(plan.strategy for plan in plans)], rows)


def _most(plan: PlannedStrategy) -> list[str]:
    """Returns the largest figures of a worker, and of a link, in a plan."""
    more = " + rows" if plan.rows_are_missing else ""
    return [
        readable_bytes(max(w.sent for w in plan.workers)) + more,
        readable_bytes(max(w.received for w in plan.workers)) + more,
        readable_bytes(max((link.bytes for link in plan.links), default=0)),
        readable_bytes(max(w.held for w in plan.workers)),
        readable_flops(_most_flops(plan)),
    ]


def _most_flops(plan: PlannedStrategy) -> int | None:
    """Returns the FLOPs of the worker that computes most; None if they are not known for all workers."""
    counts = [worker.flops for worker in plan.workers]
    return None if None in counts else max(count for count in counts if count is not None)
