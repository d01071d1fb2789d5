"""Where values come from, and the control flow of old graphs."""

from __future__ import annotations

from autodist.graph.ops import Trait, having
from autodist.graph.propagation.facts import SAME, Fact, GeneratorState, UnknownFact, names_a_sum
from autodist.graph.propagation.functions import join
from autodist.graph.propagation.op_context import OpContext, Rule


def same(ctx: OpContext) -> Fact:
    """Constants, placeholders that do not hold the batch, variables and their handles."""
    return SAME


def read_variable(ctx: OpContext) -> Fact:
    """A variable is the same on all replicas, also after a write of this step: writes are combined."""
    return ctx.facts[0] if isinstance(ctx.facts[0], UnknownFact | GeneratorState) else SAME


def pass_on(ctx: OpContext) -> Fact:
    """Enter, LoopCond, RngReadAndSkip: what it is given."""
    return ctx.facts[0]


def switch(ctx: OpContext) -> Fact:
    """Switch: the value, if all replicas take the same side."""
    if ctx.form(1) != SAME:
        return ctx.opaque("which branch is taken depends on the replica's part of the batch")
    return ctx.facts[0]


def merge(ctx: OpContext) -> list[Fact]:
    """Merge: either of its inputs."""
    total = ctx.facts[0]
    for fact in ctx.facts[1:]:
        total = join(ctx, total, fact)
    return [total, SAME]


def leave_loop(ctx: OpContext) -> Fact:
    """Exit: the last turn's value."""
    if names_a_sum(ctx.facts[0]):
        return ctx.opaque("a sum over the batch that an old while loop makes, which is not followed")
    return ctx.facts[0]


RULES: dict[str, Rule] = {
    **dict.fromkeys(having(Trait.SOURCE | Trait.FED | Trait.REFERENCE | Trait.TABLE), same),
    **dict.fromkeys(["LookupTableSizeV2", "LookupTableExportV2"], same),
    **dict.fromkeys(["ReadVariableOp", "VarIsInitializedOp", "IsVariableInitialized"], read_variable),
    "RngReadAndSkip": pass_on,
    "Enter": pass_on,
    "LoopCond": pass_on,
    "Switch": switch,
    "Merge": merge,
    "Exit": leave_loop,
}
