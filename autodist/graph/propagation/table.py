"""The table: for each op, how the batch goes through it.

Another question of the same kind (may an update be done shard by shard) is another table over the same walk.
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

_FOLLOWED = (draws, sampling, functions, lists, sources)
NOT_FOLDED = having(Trait.SHUFFLES | Trait.OF_SHAPES).union(*(rules.RULES for rules in _FOLLOWED))
"""Ops that may give something else than "the same everywhere" although all their inputs are."""
