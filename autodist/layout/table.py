"""The rule table: maps each op to the rule that propagates layouts through it.

A related analysis, such as "can an update run shard by shard?", would be another table with the same traversal.
"""

from __future__ import annotations

from autodist.graph.ops import FACTORED, Trait, having
from autodist.layout import (
    arithmetic,
    choices,
    concatenation,
    derivatives,
    distinct,
    entries,
    functions,
    images,
    lists,
    lookups,
    movement,
    network,
    permutations,
    python_calls,
    random_ops,
    reductions,
    reshape,
    row_indices,
    sampling,
    shapes,
    slices,
    sources,
    space_to_batch,
)
from autodist.layout.by_factors import by_factors
from autodist.layout.op_context import Rule

TABLE: dict[str, Rule] = {
    **dict.fromkeys(FACTORED, by_factors),
    **sources.RULES,
    **arithmetic.RULES,
    **choices.RULES,
    **reductions.RULES,
    **shapes.RULES,
    **random_ops.RULES,
    **permutations.RULES,
    **movement.RULES,
    **reshape.RULES,
    **slices.RULES,
    **concatenation.RULES,
    **lookups.RULES,
    **network.RULES,
    **images.RULES,
    **space_to_batch.RULES,
    **derivatives.RULES,
    **row_indices.RULES,
    **distinct.RULES,
    **entries.RULES,
    **sampling.RULES,
    **lists.RULES,
    **python_calls.RULES,
    **functions.RULES,
}

_RULES_WITH_STATE = (random_ops, sampling, functions, lists, sources, python_calls)
NOT_FOLDED = having(Trait.SHUFFLES | Trait.OF_SHAPES).union(*(rules.RULES for rules in _RULES_WITH_STATE))
"""Ops that may return a value that is not replicated even if all inputs are."""
