"""The table: for each op, how the batch goes through it.

Another question of the same kind (may an update be done shard by shard) is another table over the same walk.
"""

from __future__ import annotations

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
from autodist.graph.propagation.site import Rule

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
    "Enter": arithmetic.linear,
    "LoopCond": arithmetic.linear,
}

_SHAPES = (
    "Empty", "Shape", "ShapeN", "Size", "Rank", "BroadcastGradientArgs", "BroadcastArgs", "ConcatOffset",
    "DynamicStitch",
)  # fmt: skip
NOT_FOLDED = frozenset(
    [*draws.RULES, "RandomShuffle", *sampling.RULES, *functions.RULES, *lists.RULES, *sources.RULES, *_SHAPES]
)
"""Ops that may give something else than "the same everywhere" although all their inputs are."""


def draws_numbers(op: str) -> bool:
    """Whether an op makes random numbers, which are other ones on each replica although all inputs are the same."""
    return (
        "Random" in op
        or op.startswith(("StatelessTruncated", "StatelessParameterized", "StatelessShuffle"))
        or (op.endswith("Multinomial") or "SampleDistorted" in op)
    )
