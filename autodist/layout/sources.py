"""Rules for constants, placeholders and variables, and for TF1 control flow."""

from __future__ import annotations

from autodist.graph.ops import Trait, having
from autodist.layout.facts import REPLICATED, Fact, GeneratorState, UnknownFact, names_a_sum
from autodist.layout.functions import join
from autodist.layout.op_context import OpContext, Rule


def same(ctx: OpContext) -> Fact:
    """Constants, placeholders that do not hold the batch, variables and their handles: replicated."""
    return REPLICATED


def read_variable(ctx: OpContext) -> Fact:
    """Variable reads: replicated, also after a write in the same step, because writes are combined first."""
    return ctx.facts[0] if isinstance(ctx.facts[0], UnknownFact | GeneratorState) else REPLICATED


def pass_on(ctx: OpContext) -> Fact:
    """Enter, LoopCond, RngReadAndSkip, PlaceholderWithDefault: the fact of the first input."""
    return ctx.facts[0]


def switch(ctx: OpContext) -> Fact:
    """Switch: the fact of the value if all replicas take the same branch."""
    if ctx.form(1) != REPLICATED:
        return ctx.unknown("the branch that it takes depends on the replica's shard of the batch")
    return ctx.facts[0]


def merge(ctx: OpContext) -> list[Fact]:
    """Merge: the common layout of its inputs."""
    total = ctx.facts[0]
    for fact in ctx.facts[1:]:
        total = join(ctx, total, fact)
    return [total, REPLICATED]


def leave_loop(ctx: OpContext) -> Fact:
    """Exit: the value after the last iteration."""
    if names_a_sum(ctx.facts[0]):
        return ctx.unknown("it returns a sum over the batch from a TF1 while loop, which is not supported")
    return ctx.facts[0]


RULES: dict[str, Rule] = {
    **dict.fromkeys(having(Trait.SOURCE | Trait.FED | Trait.REFERENCE | Trait.TABLE), same),
    "PlaceholderWithDefault": pass_on,
    **dict.fromkeys(["LookupTableSizeV2", "LookupTableExportV2"], same),
    **dict.fromkeys(["ReadVariableOp", "VarIsInitializedOp", "IsVariableInitialized"], read_variable),
    "RngReadAndSkip": pass_on,
    "Enter": pass_on,
    "LoopCond": pass_on,
    "Switch": switch,
    "Merge": merge,
    "Exit": leave_loop,
}
