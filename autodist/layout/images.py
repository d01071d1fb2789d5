"""Rules for image ops and other ops whose first axis is the batch axis."""

from __future__ import annotations

from dataclasses import replace

from autodist.graph.ops import Trait, having
from autodist.layout.arithmetic import nonlinear
from autodist.layout.combine import operands_of, same_rows
from autodist.layout.facts import REPLICATED, Base, Fact, Form, Recovery, Sharded, UnknownFact, form_of, reordered
from autodist.layout.movement import moving
from autodist.layout.network import along_last_axis, first_axis_by_itself, is_replicated_or_noise
from autodist.layout.op_context import OpContext, Rule, op_names, tensor_name


def project(ctx: OpContext) -> Fact:
    """ImageProjectiveTransformV3 (images, one transform or one per image, size, fill value)."""
    images, transforms = form_of(ctx.facts[0]), form_of(ctx.facts[1])
    if isinstance(images, UnknownFact):
        return nonlinear(ctx, [0, 1])
    if form_of(ctx.facts[2]) != REPLICATED or any(form_of(fact) != REPLICATED for fact in ctx.facts[3:]):
        return ctx.unknown("its size is not replicated")
    if not isinstance(images, Form) or images.rows is None:
        return nonlinear(ctx, [0, 1])
    if images.rows.axis != 0 or images.factors:
        return ctx.unknown("the examples are not along its first axis")
    if isinstance(transforms, Form) and transforms.rows is not None:
        fits = not transforms.factors and same_rows(images.rows, transforms.rows)
        return images if fits else ctx.unknown("its images and its transforms do not have the same examples")
    is_one = ctx.shape(1).rank == 2 and ctx.shape(1)[0] == 1
    if is_one and is_replicated_or_noise(transforms):
        return images
    if isinstance(transforms, UnknownFact) and transforms.recovery is Recovery.BATCH_SHAPED and not is_one:
        return replace(images, mixed_at=images.mixed_at or ctx.node.name)
    return ctx.unknown("its transforms are not replicated, or belong to positions in the batch")


def pool_with_positions(ctx: OpContext) -> list[Fact]:
    """MaxPoolWithArgmax: values, and their positions within each image or within the whole shard."""
    values = first_axis_by_itself(ctx)
    if ctx.flag("include_batch_in_index") and not (isinstance(values, Form) and values.is_replicated):
        return [values, ctx.unknown("it returns positions within the replica's shard of the batch")]
    return [values, values]


def roll(ctx: OpContext, form: Form, batch: Sharded) -> Fact:
    axes, rank = ctx.integers(2), ctx.rank(0)
    if form_of(ctx.facts[1]) != REPLICATED or axes is None or None in axes or rank is None:
        return ctx.unknown("the axes along which it rolls are not known")
    if batch.axis in [axis % rank for axis in axes if axis is not None]:
        moved = ctx.constant(1)
        by = ctx.inputs[1] if moved is None else (tuple(moved.reshape(-1)), tuple(axes))
        return reordered(form, ("rolled", by), ctx.node.name)
    return form


def count_values(ctx: OpContext) -> Fact:
    """DenseBincount: counts per row of a matrix; for a vector, counts over the batch."""
    values = ctx.form(0)
    weights = operands_of(ctx, (2,))[0]
    if isinstance(values, UnknownFact):
        return UnknownFact(values.reason)
    if values.rows is None or values.rows.axis != 0 or values.factors:
        return ctx.unknown("its values do not have the examples along the first axis")
    if form_of(ctx.facts[1]) != REPLICATED and not _is_bounded(ctx, ctx.inputs[1]):
        return ctx.unknown("the number of bins may differ between replicas")
    has_none = ctx.shape(2).num_elements() == 0
    are_rows = isinstance(weights, Form) and weights.rows is not None and same_rows(weights.rows, values.rows)
    if not isinstance(weights, Form) or not (are_rows or (weights.is_replicated and has_none)):
        return ctx.unknown("its weights do not belong to the same examples")
    if ctx.rank(0) == 2:
        return replace(values, factors=weights.factors, mixed_at=values.mixed_at or weights.mixed_at)
    if ctx.rank(0) == 1 and not ctx.flag("binary_output"):
        return Form(Base.PARTIAL_SUM, weights.factors, values.mixed_at or weights.mixed_at)
    return ctx.unknown("it checks which values occur in the batch, which is neither a sum nor a mean")


def _is_bounded(ctx: OpContext, tensor: str) -> bool:
    """Returns True for `minimum(maximum(x, n), n)`, whose value is always n."""
    bounds: dict[str, list[int]] = {"Minimum": [], "Maximum": []}
    passes = having(Trait.IDENTITY | Trait.CASTS)
    node = ctx.scope.producer(tensor)
    while node is not None and (node.op in bounds or node.op in passes):
        sources = [tensor_name(name) for name in node.input if not name.startswith("^")]
        known = [value for value in map(ctx.scope.constant, sources) if value is not None]
        if node.op in bounds and len(known) == 1:
            bounds[node.op] += [int(known[0])]
        others = [name for name in sources if ctx.scope.constant(name) is None]
        node = ctx.scope.producer(others[0]) if others else None
    return len(bounds["Minimum"]) == 1 and bounds["Minimum"] == bounds["Maximum"]


RULES: dict[str, Rule] = {
    **dict.fromkeys(op_names("ScaleAndTranslate ExtractImagePatches ExtractVolumePatches"), first_axis_by_itself),
    **dict.fromkeys(
        op_names("RGBToHSV HSVToRGB AdjustHue AdjustSaturation IsotonicRegression FakeQuantWithMinMaxVarsPerChannel"),
        along_last_axis,
    ),
    "MaxPoolWithArgmax": pool_with_positions,
    **dict.fromkeys(["ImageProjectiveTransformV2", "ImageProjectiveTransformV3"], project),
    "Roll": moving(roll),
    "DenseBincount": count_values,
}
