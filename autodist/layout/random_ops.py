"""Rules for random ops: numbers per example if the shape holds the batch, else replicated (shared seed) or noise."""

from __future__ import annotations

from dataclasses import replace

from autodist.graph.ops import Trait, having
from autodist.layout.combine import same_rows
from autodist.layout.facts import (
    REPLICATED,
    Dims,
    Fact,
    Form,
    GeneratorState,
    Recovery,
    UnknownFact,
    common_generator_state,
    form_of,
    is_noise,
)
from autodist.layout.op_context import OpContext, Rule, op_names
from autodist.layout.shapes import counted_batch


def of_shape(ctx: OpContext) -> Fact:
    """Random ops: rows if the shape holds the batch, else noise that each replica draws independently.

    If the seed is replicated and no generator state, all replicas draw equal numbers.
    """
    dims = ctx.dims(0)
    batch = counted_batch(ctx, 0, dims) if dims is not None else None
    if batch is not None:
        return Form(batch)
    if ctx.node.op in having(Trait.BY_KEY) and are_drawn_alike(ctx):
        return REPLICATED
    return ctx.unknown("it draws random numbers of a fixed shape, which each replica draws for itself", Recovery.ALWAYS)


def key(ctx: OpContext) -> list[Fact]:
    """Ops that derive a key, a counter and an algorithm from a seed."""
    if (state := common_generator_state(ctx.facts)) is not None:
        return [state] * _MAX_OUTPUTS
    return [
        REPLICATED if are_drawn_alike(ctx) else ctx.unknown("its seed is not the same on all replicas")
    ] * _MAX_OUTPUTS


def are_drawn_alike(ctx: OpContext) -> bool:
    """Returns True if all inputs of a stateless random op are replicated, and none is a generator's state."""
    return all(form_of(fact) == REPLICATED and not isinstance(fact, GeneratorState) for fact in ctx.facts)


def of_shape_and(*parameters: int) -> Rule:
    """Returns a rule like `of_shape` for ops with distribution parameters, which are broadcast to the shape."""

    def apply(ctx: OpContext) -> Fact:
        drawn, dims = of_shape(ctx), ctx.dims(0)
        drawn_rows = drawn.rows if isinstance(drawn, Form) else None
        for index in parameters:
            form, rank = ctx.form(index), ctx.rank(index)
            if is_noise(ctx.facts[index]) or form == REPLICATED:
                continue
            if isinstance(form, UnknownFact):
                return UnknownFact(form.reason)
            if drawn_rows is None or form.rows is None or form.factors or dims is None or rank is None:
                return ctx.unknown("the parameters of its distribution depend on the batch, but not per example")
            if not same_rows(replace(form.rows, axis=form.rows.axis + len(dims.forms) - rank), drawn_rows):
                return ctx.unknown(
                    "its numbers and the parameters of its distribution do not belong to the same examples"
                )
        return drawn

    return apply


def draw_classes(ctx: OpContext) -> Fact:
    """Multinomial: draws classes for each row of logits."""
    form = ctx.form(0)
    if isinstance(form, Form) and form.rows is not None and form.rows.axis == 0 and not form.factors:
        return form if form_of(ctx.facts[1]) == REPLICATED else ctx.unknown("the number of draws is not replicated")
    if ctx.node.op in having(Trait.BY_KEY) and are_drawn_alike(ctx):
        return REPLICATED
    return ctx.unknown("it draws random numbers, which each replica draws for itself", Recovery.ALWAYS)


def draw_for_each(ctx: OpContext) -> Fact:
    """RandomGamma, RandomPoissonV2: draws numbers for each element of a distribution parameter."""
    dims, form = ctx.dims(0), ctx.form(1)
    if isinstance(form, Form) and form.rows is not None:
        if dims is not None and dims.is_replicated and not form.factors:
            return replace(form, base=replace(form.rows, axis=form.rows.axis + len(dims.forms)))
        return ctx.unknown("the number of draws is not replicated")
    if isinstance(dims, Dims) and not dims.is_replicated:
        return _drawn_for_batch(ctx, dims)
    return ctx.unknown("it draws random numbers of a fixed shape, which each replica draws for itself", Recovery.ALWAYS)


def _drawn_for_batch(ctx: OpContext, dims: Dims) -> Fact:
    batch = counted_batch(ctx, 0, dims)
    return (
        Form(batch)
        if batch is not None and form_of(ctx.facts[1]) == REPLICATED
        else ctx.unknown("its shape is not known")
    )


_MAX_OUTPUTS = 3

RULES: dict[str, Rule] = {
    **dict.fromkeys(
        op_names("RandomUniform RandomStandardNormal RandomUniformInt TruncatedNormal ParameterizedTruncatedNormal"),
        of_shape,
    ),
    **dict.fromkeys(having(Trait.BY_KEY), of_shape),
    **dict.fromkeys(having(Trait.KEY), key),
    **dict.fromkeys(["Multinomial", "StatelessMultinomial"], draw_classes),
    **dict.fromkeys(["RandomGamma", "RandomPoissonV2"], draw_for_each),
    **dict.fromkeys(["StatelessRandomGammaV2", "StatelessRandomPoisson"], of_shape_and(2)),
    "StatelessRandomBinomial": of_shape_and(2, 3),
    "StatelessRandomGammaV3": of_shape_and(4),
    "StatelessParameterizedTruncatedNormal": of_shape_and(2, 3, 4, 5),
}
