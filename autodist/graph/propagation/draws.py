"""Random numbers: for each example where the batch says how many; else the same by a shared seed, or noise of each."""

from __future__ import annotations

from dataclasses import replace

from autodist.graph.ops import Trait, having
from autodist.graph.propagation.combine import same_rows
from autodist.graph.propagation.facts import (
    SAME,
    Dims,
    Fact,
    Form,
    GeneratorState,
    Recovery,
    UnknownFact,
    form_of,
    is_noise,
    made_of_state,
)
from autodist.graph.propagation.op_context import OpContext, Rule, op_names
from autodist.graph.propagation.shapes import counted_batch


def of_shape(ctx: OpContext) -> Fact:
    """Random numbers: one draw an example where the shape holds the batch, else noise of each replica's own.

    By a seed that all replicas share, and that is no generator's state, they draw the same.
    """
    dims = ctx.dims(0)
    batch = counted_batch(ctx, 0, dims) if dims is not None else None
    if batch is not None:
        return Form(batch)
    if ctx.node.op in having(Trait.BY_KEY) and are_drawn_alike(ctx):
        return SAME
    return ctx.opaque("random numbers of a fixed shape, which each replica draws for itself", Recovery.ALWAYS)


def key(ctx: OpContext) -> list[Fact]:
    """What is made of a seed to draw by it, and which algorithm does so."""
    if (state := made_of_state(ctx.facts)) is not None:
        return [state] * _MOST_OUTPUTS
    return [SAME if are_drawn_alike(ctx) else ctx.opaque("its seed is not the same on all replicas")] * _MOST_OUTPUTS


def are_drawn_alike(ctx: OpContext) -> bool:
    """Whether all that says what a stateless op draws is the same on all replicas, and no generator's state."""
    return all(form_of(fact) == SAME and not isinstance(fact, GeneratorState) for fact in ctx.facts)


def of_shape_and(*parameters: int) -> Rule:
    """The same of ops that other inputs, which are broadcast to the shape, tell how the numbers are distributed."""

    def apply(ctx: OpContext) -> Fact:
        drawn, dims = of_shape(ctx), ctx.dims(0)
        own = drawn.rows if isinstance(drawn, Form) else None
        for index in parameters:
            form, rank = ctx.form(index), ctx.rank(index)
            if is_noise(ctx.facts[index]) or form == SAME:
                continue
            if isinstance(form, UnknownFact):
                return UnknownFact(form.reason)
            if own is None or form.rows is None or form.factors or dims is None or rank is None:
                return ctx.opaque("how its numbers are distributed depends on the batch, and not by examples")
            if not same_rows(replace(form.rows, axis=form.rows.axis + len(dims.forms) - rank), own):
                return ctx.opaque("its numbers and how they are distributed do not belong to the same examples")
        return drawn

    return apply


def draw_classes(ctx: OpContext) -> Fact:
    """Multinomial: some draws for each row of logits."""
    form = ctx.form(0)
    if isinstance(form, Form) and form.rows is not None and form.rows.axis == 0 and not form.factors:
        return form if form_of(ctx.facts[1]) == SAME else ctx.opaque("how often it draws is not the same everywhere")
    if ctx.node.op in having(Trait.BY_KEY) and are_drawn_alike(ctx):
        return SAME
    return ctx.opaque("random numbers, which each replica draws for itself", Recovery.ALWAYS)


def draw_for_each(ctx: OpContext) -> Fact:
    """RandomGamma, RandomPoissonV2: some draws for each element of what says how they are distributed."""
    dims, form = ctx.dims(0), ctx.form(1)
    if isinstance(form, Form) and form.rows is not None:
        if dims is not None and dims.is_same and not form.factors:
            return replace(form, base=replace(form.rows, axis=form.rows.axis + len(dims.forms)))
        return ctx.opaque("how often it draws is not the same everywhere")
    if isinstance(dims, Dims) and not dims.is_same:
        return _drawn_for_batch(ctx, dims)
    return ctx.opaque("random numbers of a fixed shape, which each replica draws for itself", Recovery.ALWAYS)


def _drawn_for_batch(ctx: OpContext, dims: Dims) -> Fact:
    batch = counted_batch(ctx, 0, dims)
    return Form(batch) if batch is not None and form_of(ctx.facts[1]) == SAME else ctx.opaque("its shape is not known")


_MOST_OUTPUTS = 3

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
