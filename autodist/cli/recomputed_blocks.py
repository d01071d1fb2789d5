"""The recomputed blocks in the plan of a step."""

from __future__ import annotations

from collections.abc import Sequence

import pydantic
from rich.table import Table

from autodist.graph.partial_count import PartialCount, saved_by_recomputation
from autodist.logs.formatting import listed
from autodist.logs.tables import text_table
from autodist.strategies.stage_table import bytes_text, flops_text

RECOMPUTED_HEADS = ("recomputed block", "frees", "FLOPs again", "runs once")


class RecomputedBlockPlan(pydantic.BaseModel):
    """A block that the backward pass recomputes, on one worker.

    Attributes:
        name: its name.
        bytes: bytes of its activations that are freed after the forward pass.
        flops: FLOPs that are computed again.
        kept: the ops whose values are kept because they must not run twice.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    name: str
    bytes: PartialCount
    flops: PartialCount
    kept: tuple[str, ...] = ()


def recomputed_table(blocks: Sequence[RecomputedBlockPlan], flops: int | None) -> Table:
    """Returns a table with a row for each block.

    Args:
        blocks: the plans of the blocks.
        flops: FLOPs of the worker's step without recomputation; None: not known.
    """
    return text_table(
        "recomputation on a worker",
        RECOMPUTED_HEADS,
        recomputed_rows(blocks),
        numbers=RECOMPUTED_HEADS[1:3],
        caption=recomputed_caption(blocks, flops),
    )


def recomputed_rows(blocks: Sequence[RecomputedBlockPlan]) -> list[list[str]]:
    """Returns the rows under `RECOMPUTED_HEADS`."""
    return [[one.name, bytes_text(one.bytes), flops_text(one.flops), listed(one.kept)] for one in blocks]


def recomputed_caption(blocks: Sequence[RecomputedBlockPlan], flops: int | None) -> str:
    """Returns a sentence with the memory that all blocks save, and the computation that they add."""
    again = sum((one.flops for one in blocks), PartialCount())
    saved = saved_by_recomputation([one.bytes for one in blocks])
    more = f", {round(100 * again.count / flops)} % more" if flops and again.count else ""
    return f"The backward pass holds {bytes_text(saved)} less, and computes {flops_text(again)} FLOPs again{more}"


def without_recomputed(activations: PartialCount, blocks: Sequence[RecomputedBlockPlan]) -> PartialCount:
    """Returns the bytes of the activations that stay in memory if blocks are recomputed."""
    saved = saved_by_recomputation([one.bytes for one in blocks])
    return PartialCount(activations.count - saved.count, activations.is_least or saved.is_least)
