"""Rule for ops that call Python functions of the script."""

from __future__ import annotations

from autodist.graph.python_calls import is_elementwise, marked_call, name_called
from autodist.layout.combine import operands_of, same_rows
from autodist.layout.facts import REPLICATED, Fact, Form, Recovery, UnknownFact
from autodist.layout.op_context import OpContext, Rule


def call(ctx: OpContext) -> list[Fact]:
    """A function marked by `ad.elementwise` computes a row from the same row of its arguments; others are unknown."""
    return [_result(ctx)] * len(ctx.node.attr["Tout"].list.type)


def _result(ctx: OpContext) -> Fact:
    if not is_elementwise(ctx.node):
        called = name_called(ctx.node) or "a function"
        why = (
            f"it calls Python code, {called}. If {called} works on one row at a time, mark it: {marked_call(ctx.node)}"
        )
        return ctx.unknown(why, Recovery.BATCH_SHAPED)
    found: Form | None = None
    for operand in operands_of(ctx):
        if isinstance(operand, UnknownFact):
            return operand
        if not isinstance(operand, Form) or operand.factors or not (operand.rows or operand.is_replicated):
            return ctx.unknown("it calls marked Python code with a value that combines examples")
        if operand.rows is None:
            continue
        if operand.rows.axis != 0 or not (found is None or _are_alike(found, operand)):
            return ctx.unknown("it calls marked Python code with rows that do not belong to the same examples")
        found = found if found is not None and (found.mixed_at or not operand.mixed_at) else operand
    return REPLICATED if found is None else found


def _are_alike(left: Form, right: Form) -> bool:
    """Returns True if two operands have the same number of rows for each example, in the same order."""
    one, other = left.rows, right.rows
    return one is not None and other is not None and one.per == other.per and same_rows(one, other)


RULES: dict[str, Rule] = dict.fromkeys(("PyFunc", "PyFuncStateless", "EagerPyFunc"), call)
