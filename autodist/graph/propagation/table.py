"""The rule table: maps each op to the rule that propagates layouts through it.

A related analysis, such as "can an update run shard by shard?", would be another table with the same traversal.
"""

from __future__ import annotations

from autodist.graph.ops import Trait, having
from autodist.graph.propagation import (
    arithmetic,
    blocks,
    choices,
    contractions,
    derivatives,
    distinct,
    draws,
    entries,
    functions,
    images,
    layout,
    lists,
    lookups,
    matrices,
    network,
    pieces,
    positions,
    reductions,
    sampling,
    shapes,
    shuffles,
    slices,
    sources,
)
from autodist.graph.propagation.op_context import Rule

TABLE: dict[str, Rule] = {
    **sources.RULES,
    **arithmetic.RULES,
    **choices.RULES,
    **reductions.RULES,
    **shapes.RULES,
    **draws.RULES,
    **shuffles.RULES,
    **layout.RULES,
    **slices.RULES,
    **pieces.RULES,
    **lookups.RULES,
    **contractions.RULES,
    **network.RULES,
    **matrices.RULES,
    **images.RULES,
    **blocks.RULES,
    **derivatives.RULES,
    **positions.RULES,
    **distinct.RULES,
    **entries.RULES,
    **sampling.RULES,
    **lists.RULES,
    **functions.RULES,
}

_RULES_WITH_STATE = (draws, sampling, functions, lists, sources)
NOT_FOLDED = having(Trait.SHUFFLES | Trait.OF_SHAPES).union(*(rules.RULES for rules in _RULES_WITH_STATE))
"""Ops that may return a value that is not replicated even if all inputs are."""
