"""Renders plans as tables for a terminal, and as an HTML page with plots; a browser loads nothing but the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree

from rich.table import Table

from autodist.cli.html_page import add, add_bars, add_table, begin_page, text_of
from autodist.cli.plans import PlannedStrategy, Plans, VariablePlan
from autodist.cli.recomputed_blocks import (
    RECOMPUTED_HEADS,
    recomputed_caption,
    recomputed_rows,
    recomputed_table,
)
from autodist.graph.partial_count import PartialCount
from autodist.logs.formatting import listed, readable_bytes, readable_flops, readable_shape
from autodist.logs.tables import NARROW, text_table
from autodist.strategies.choice_table import CHOICE_HEADS, REASON_HEADS
from autodist.strategies.mesh_table import (
    COLLECTIVE_HEADS,
    PART_HEADS,
    collective_rows,
    mesh_tables,
    part_rows,
)
from autodist.strategies.stage_table import CUT_HEADS, STAGE_HEADS, bytes_text, cut_rows, stage_rows, stage_tables
from autodist.strategies.table import ALL_WORKERS, owners_text

MOST_LINKS = 12
"""Number of links shown: those with the most bytes. The others are counted."""

_HEADS = ("variable", "shape", "bytes", "gradient", "synchronizer", "where", "slots", "sent a step")

WORKER_HEADS = ("worker", "replicas", "sends a step", "receives", "holds", "activations", "FLOPs a step")


def tables_of(plans: Sequence[PlannedStrategy], width: int) -> Iterator[Table]:
    """Yields the tables of one plan (variables, workers, links), or of several plans side by side.

    Args:
        plans: the plans of one step.
        width: columns of the terminal.
    """
    if len(plans) == 1:
        if plans[0].mesh is None:
            yield _variables(plans[0], width)
        else:
            yield from mesh_tables(plans[0].mesh, plans[0].title, width)
        yield _workers(plans[0])
        if plans[0].choice is not None:
            yield plans[0].choice.table()
            yield text_table("reasons", REASON_HEADS, plans[0].choice.reason_rows, has_lines=True)
        if plans[0].pipeline is not None:
            yield from stage_tables(plans[0].pipeline)
        if plans[0].recomputed:
            yield recomputed_table(plans[0].recomputed, plans[0].workers[0].flops)
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
    """Names the workers that hold a variable, or its shards; on a mesh, describes the division."""
    if variable.sharding:
        return variable.sharding
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
    rows = [_row(v, _slots(v)) for v in plan.variables]
    return text_table(plan.title, _HEADS, rows, numbers=("bytes", "sent a step"))


def _row(variable: VariablePlan, slots: str) -> list[str]:
    return [variable.name, *_properties(variable), variable.synchronizer, where(variable), slots, cost(variable)]


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
        [
            w.name,
            str(w.replicas),
            *(bytes_text(PartialCount(count, w.is_least)) for count in (w.sent, w.received)),
            readable_bytes(w.held),
            "not known" if w.activations is None else bytes_text(w.activations),
            readable_flops(w.flops),
        ]
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
    heads = ("sends a step", "receives", "on one link", "holds", "activations", "FLOPs a step")
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
        _most_activations(plan),
        readable_flops(_most_flops(plan)),
    ]


def _most_activations(plan: PlannedStrategy) -> str:
    counts = [worker.activations for worker in plan.workers]
    known = [count for count in counts if count is not None]
    return bytes_text(max(known, key=lambda one: one.count)) if known and len(known) == len(counts) else "not known"


def _most_flops(plan: PlannedStrategy) -> int | None:
    """Returns the FLOPs of the worker that computes most; None if they are not known for all workers."""
    counts = [worker.flops for worker in plan.workers]
    return None if None in counts else max(count for count in counts if count is not None)


MOST_BARS = 64
"""Number of links shown: those with the most bytes. The others are counted below."""


def page_of(plans: Plans) -> str:
    """Returns the page as HTML; names are escaped."""
    html, body = begin_page(f"Plan of {plans.script}")
    add(body, "p", "Sent and received bytes are those of gradients and variable values in one training step, and on a "
         "mesh also those of the tensors that places exchange. A worker holds variables with the optimizer's slots. "
         "FLOPs are TensorFlow's count for a worker's part of the first batch.")  # fmt: skip
    if plans.note:
        add(body, "p", plans.note)
    for plan in plans.plans:
        _add_plan(body, plan)
    return text_of(html)


def _add_plan(body: ElementTree.Element, plan: PlannedStrategy) -> None:
    add(body, "h2", plan.title)
    if plan.rows_are_missing:
        add(body, "p", "The number of sparse rows that a step touches is not known; their bytes are extra.")
    if plan.sums:
        add(body, "p", f"{plan.sums[0].upper()}{plan.sums[1:]}.")
    if plan.choice is not None:
        add(body, "h3", plan.choice.title)
        add(body, "p", f"{plan.choice.caption[0].upper()}{plan.choice.caption[1:]}.")
        add_table(body, CHOICE_HEADS, plan.choice.rows, first_number=1)
        add_table(body, REASON_HEADS, plan.choice.reason_rows, first_number=len(REASON_HEADS))
    add(body, "h3", "Memory held by each worker")
    add_bars(body, [(worker.name, [worker.held]) for worker in plan.workers][:MOST_BARS], _readable)
    _add_more(body, len(plan.workers), "workers")
    add(body, "h3", "Bytes per step on each link")
    links = sorted(plan.links, key=lambda link: -link.bytes)
    if links:
        bars = [(f"{link.source} → {link.target}", [link.bytes]) for link in links[:MOST_BARS]]
        add_bars(body, bars, _readable)
        _add_more(body, len(links), "links, with at most as many bytes each")
    else:
        add(body, "p", "None: there is only one worker, or only rows of unknown number are sent.")
    add(body, "h3", "Workers")
    add_table(body, WORKER_HEADS, worker_rows(plan), first_number=1)
    if plan.pipeline is not None:
        add(body, "h3", "Stages")
        add(body, "p", f"{plan.pipeline.caption}.")
        add_table(body, STAGE_HEADS, stage_rows(plan.pipeline), first_number=2)
        add(body, "h3", "Cross-stage transfers")
        add_table(body, CUT_HEADS, cut_rows(plan.pipeline), first_number=1)
    if plan.recomputed:
        add(body, "h3", "Recomputation on a worker")
        add(body, "p", f"{recomputed_caption(plan.recomputed, plan.workers[0].flops)}.")
        add_table(body, RECOMPUTED_HEADS, recomputed_rows(plan.recomputed), first_number=1)
    add(body, "h3", "Variables")
    if plan.mesh is not None:
        add(body, "p", f"{plan.mesh.caption}.")
        add_table(body, PART_HEADS, part_rows(plan.mesh), first_number=len(PART_HEADS) - 2)
        if plan.mesh.collectives:
            add(body, "h3", "Collectives")
            add(body, "p", f"{plan.mesh.batch}.")
            add_table(body, COLLECTIVE_HEADS, collective_rows(plan.mesh.collectives), first_number=2)
        return
    slots = [listed(f"{slot.name} ({readable_bytes(slot.bytes)})" for slot in v.slots) for v in plan.variables]
    rows = [_row(v, text) for v, text in zip(plan.variables, slots, strict=True)]
    add_table(body, _HEADS, rows, first_number=len(_HEADS))


def _readable(count: float) -> str:
    return readable_bytes(round(count))


def _add_more(parent: ElementTree.Element, count: int, of: str) -> None:
    if count > MOST_BARS:
        add(parent, "p", f"and {count - MOST_BARS} more {of}")
