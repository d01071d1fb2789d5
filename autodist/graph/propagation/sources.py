"""Where values come from, and the control flow of old graphs."""

from __future__ import annotations

from autodist.graph.ops import Trait, having
from autodist.graph.propagation.facts import SAME, Fact, GeneratorState, UnknownFact, names_a_sum
from autodist.graph.propagation.functions import join
from autodist.graph.propagation.op_context import OpContext, Rule


def same(site: OpContext) -> Fact:
    """Constants, placeholders that do not hold the batch, variables and their handles."""
    return SAME


def read_variable(site: OpContext) -> Fact:
    """A variable is the same on all replicas, also after a write of this step: writes are combined."""
    return site.facts[0] if isinstance(site.facts[0], UnknownFact | GeneratorState) else SAME


def pass_on(site: OpContext) -> Fact:
    """Enter, LoopCond, RngReadAndSkip: what it is given."""
    return site.facts[0]


def switch(site: OpContext) -> Fact:
    """Switch: the value, if all replicas take the same side."""
    if site.form(1) != SAME:
        return site.opaque("which branch is taken depends on the replica's part of the batch")
    return site.facts[0]


def merge(site: OpContext) -> list[Fact]:
    """Merge: either of its inputs."""
    total = site.facts[0]
    for fact in site.facts[1:]:
        total = join(site, total, fact)
    return [total, SAME]


def leave_loop(site: OpContext) -> Fact:
    """Exit: the last turn's value."""
    if names_a_sum(site.facts[0]):
        return site.opaque("a sum over the batch that an old while loop makes, which is not followed")
    return site.facts[0]


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
