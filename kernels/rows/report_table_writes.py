"""Reports updates of a sparse variable and its slots that write whole tables, with the reason."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from autodist.graph.editor import GraphEditor
from autodist.graph.find_stages import find_stages
from autodist.graph.names import data_inputs, is_control, node_of, tensor
from autodist.graph.ops import Trait, having
from autodist.graph.parts import Variable
from autodist.graph.stages import Stages
from autodist.graph.step import CapturedStep
from autodist.graph.step_editor import StepEditor
from autodist.kernels.base import Context, Kernel
from autodist.kernels.rows.scatter_rows import ScatterRows
from autodist.kernels.rule import Facts, Refusal

log = logging.getLogger("autodist")


@dataclass(frozen=True)
class TableWrite:
    """A write of all rows of a variable; it belongs to the update of a sparse variable of the same shape.

    Attributes:
        variable: the written variable.
        node: the writing node.
        op: of that node.
        read: the variables whose rows, besides the gradient, are inputs of the new rows.
        since: for an addition, the reason why it was not replaced by a scatter of rows.
    """

    variable: str
    node: str
    op: str
    read: tuple[str, ...]
    since: str | None = None


@dataclass(frozen=True)
class ReportTableWrites(Kernel[CapturedStep, CapturedStep]):
    """Logs once per sparse variable the parts of its update that cost the whole table; changes nothing."""

    name: ClassVar[str] = "report-table-writes"
    after: ClassVar[Mapping[str, str]] = {
        "rewrite-rows": "the tables that remain are needed in full",
    }

    def apply(self, step: CapturedStep, context: Context) -> CapturedStep:
        if context.worker == 0 and any(gradient.is_sparse for gradient in step.gradients):
            for table, writes in find_table_writes(step).items():
                log_once(_report(step.by_name[table], writes))
        return step


@functools.cache  # a table is reported for several steps, also with other shapes
def log_once(text: str) -> None:
    """Logs a text once in a process."""
    log.info(text)


def _report(table: Variable, writes: Iterable[TableWrite]) -> str:
    lines = [
        f"  {w.variable}: {w.op} ({w.node}) " + (
            f"recomputes every row from those of {', '.join(w.read)}" if w.read
            else "writes every row"
        ) + (f", since {w.since}" if w.since else "")
        for w in writes
    ]  # fmt: skip
    return (
        f"{table.name} has {table.shape[0]} rows and a sparse gradient, and its update writes all rows in every step, "
        "because its optimizer changes rows that a batch does not touch; SGD without momentum and Adagrad do not:\n"
    ) + "\n".join(lines)


def find_table_writes(step: CapturedStep) -> dict[str, list[TableWrite]]:
    """Maps each variable with a sparse gradient to the writes of whole tables of its shape.

    A write belongs to it if it depends on the gradient, or writes the variable outside the update stage (weight decay).
    """
    tables = {g.variable: step.by_name[g.variable] for g in step.gradients if g.is_sparse}
    shapes = {variable.shape for variable in tables.values()}
    editor, stages = StepEditor(step), find_stages(step)
    rows = Facts(step, editor)
    found: dict[str, list[TableWrite]] = {}
    for name in stages.writes:
        if editor[name].op not in having(Trait.ASSIGNMENT):
            continue
        (handle,) = stages.effects[name].writes
        variable = step.by_handle[handle]
        if variable.shape not in shapes:
            continue
        behind = _gradients_behind(editor, stages, name) if name in stages.update else [variable.name]
        for table in behind:
            if table in tables and tables[table].shape == variable.shape:
                read = _read_by(step, editor, stages, name, variable.shape)
                write = TableWrite(variable.name, name, editor[name].op, read, _refusal(rows, name))
                found.setdefault(table, []).append(write)
    return found


def _refusal(rows: Facts, write: str) -> str | None:
    """Returns the reason why a write's addition was not replaced by a scatter of rows."""
    rule, node = ScatterRows(), rows.editor[write]
    answer = rule.match(rows, node) if node.op in rule.ops else None
    return answer.reason if isinstance(answer, Refusal) else None


def _gradients_behind(editor: GraphEditor, stages: Stages, write: str) -> list[str]:
    """Returns the variables whose gradients a write depends on, through data or earlier writes."""
    gradient_of = {t: g.variable for g in stages.gradients for t in g.tensors}
    found: dict[str, None] = {}
    front = [write]
    seen = {write}
    while front:
        name = front.pop()
        effect = stages.effects.get(name)
        sources = [w for handle in (effect.reads if effect else ()) for w in stages.writes_before(name, handle)]
        for i in filter(lambda i: not is_control(i), editor[name].input):
            if tensor(i) in gradient_of:
                found[gradient_of[tensor(i)]] = None
            else:
                sources.append(node_of(i))
        new = [s for s in sources if s in stages.update and s not in seen]
        seen.update(new)
        front += new
    return list(found)


def _read_by(
    step: CapturedStep, editor: GraphEditor, stages: Stages, write: str, shape: tuple[int, ...]
) -> tuple[str, ...]:
    """Returns the variables of a given shape that the value of a write reads through elementwise ops alone."""
    handles: Mapping[str, Variable] = step.by_handle
    found: dict[str, None] = {}
    front = [node_of(editor[write].input[1])]
    seen = set(front)
    while front:
        name = front.pop()
        if editor[name].op == "ReadVariableOp":
            read = next(iter(stages.effects[name].reads), None)
            if read is not None and handles[read].shape == shape:
                found[handles[read].name] = None
        elif editor[name].op in having(Trait.ELEMENTWISE):
            new = set(map(node_of, data_inputs(editor[name]))) - seen
            seen |= new
            front += sorted(new)
    return tuple(sorted(found))
