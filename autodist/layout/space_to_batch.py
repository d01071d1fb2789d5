"""Rules for SpaceToBatch and BatchToSpace, which TensorFlow uses for dilated convolutions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autodist.layout.facts import Fact, Form, Sharded
from autodist.layout.movement import moving
from autodist.layout.op_context import OpContext, Rule

_IN_BLOCKS = "in blocks of space"


def space_to_batch(ctx: OpContext) -> Fact:
    """SpaceToBatchND: the first position of each block for all examples, then the second, and so on."""
    return moving(_to_batch)(ctx)


def _to_batch(ctx: OpContext, form: Form, batch: Sharded) -> Fact:
    places = _places(ctx)
    if places is None or batch.axis != 0:
        return ctx.unknown("its block shape is not known, or the examples are not along the first axis")
    per = None if batch.per is None else batch.per * int(np.prod(places))
    return replace(form, base=replace(batch, per=per, order=(_IN_BLOCKS, places, batch.order)))


def batch_to_space(ctx: OpContext) -> Fact:
    """BatchToSpaceND: reverses SpaceToBatchND if the block shapes match."""
    return moving(_to_space)(ctx)


def _to_space(ctx: OpContext, form: Form, batch: Sharded) -> Fact:
    places = _places(ctx)
    if places is None or batch.axis != 0 or batch.order[:2] != (_IN_BLOCKS, places):
        return ctx.unknown("its input was not produced by SpaceToBatchND with the same block shape")
    before = batch.order[2]
    assert isinstance(before, tuple)
    per = None if batch.per is None else batch.per / int(np.prod(places))
    return replace(form, base=replace(batch, per=per, order=before))


def _places(ctx: OpContext) -> tuple[int, ...] | None:
    values = ctx.integers(1)
    known = tuple(value for value in values or () if value is not None)
    return known if values and len(known) == len(values) else None


RULES: dict[str, Rule] = {"SpaceToBatchND": space_to_batch, "BatchToSpaceND": batch_to_space}
