"""Rules for gathers, one-hot encodings and lookup tables: rows of indices return rows of values."""

from __future__ import annotations

from dataclasses import replace

from autodist.graph.names import data_inputs
from autodist.graph.ops import Trait, factor_rule, having
from autodist.layout.combine import Divided, divided, same_rows, with_result_axis
from autodist.layout.distinct import looked_up
from autodist.layout.entries import kept, values_at
from autodist.layout.facts import (
    REPLICATED,
    Coordinates,
    Dims,
    Fact,
    Form,
    Permutation,
    Positions,
    RowsWithTail,
    SelectedByPosition,
    Sharded,
    UnknownFact,
    elements_of,
    form_of,
    is_noise,
)
from autodist.layout.op_context import OpContext, Rule, tensor_name
from autodist.layout.permutations import permuted_by
from autodist.layout.row_indices import element_of_each
from autodist.layout.sampling import of_both


def gather(ctx: OpContext) -> Fact:
    """GatherV2 (params, indices, axis)."""
    if isinstance(ctx.facts[0], Dims) and not ctx.facts[0].is_scalar:
        return _gather_of_dims(ctx, ctx.facts[0])
    axis, rank = ctx.scalar(2), ctx.rank(0)
    if axis is None or (axis < 0 and rank is None):
        return ctx.unknown("the axis along which it gathers is not known")
    return _gather(ctx, axis if axis >= 0 else axis + (rank or 0), _batch_dims(ctx))


def gather_first_axis(ctx: OpContext) -> Fact:
    """Gather, ResourceGather."""
    if isinstance(ctx.facts[0], Dims) and not ctx.facts[0].is_scalar:
        return _gather_of_dims(ctx, ctx.facts[0])
    return _gather(ctx, 0, _batch_dims(ctx))


def _batch_dims(ctx: OpContext) -> int:
    value = ctx.number("batch_dims")
    rank = ctx.rank(1)
    return value if value >= 0 else value + (rank or 0)


def _gather_of_dims(ctx: OpContext, dims: Dims) -> Fact:
    indices = ctx.dims(1)
    if indices is None or any(value is None for value in indices.values):
        return ctx.unknown("the selected elements of a shape are not known")
    chosen = [value for value in indices.values if value is not None]
    return Dims(
        tuple(dims.forms[index] for index in chosen),
        tuple(dims.values[index] for index in chosen),
        indices.is_scalar,
    )


def _gather(ctx: OpContext, axis: int, batch_dims: int) -> Fact:
    if axis == 0 and not batch_dims and (result := _gather_special(ctx)) is not None:
        return result
    if isinstance(ctx.facts[1], Positions):
        return _masked(ctx, ctx.facts[1], axis)
    if is_noise(ctx.facts[1]) and not batch_dims:
        return _at_random_positions(ctx, axis)
    forms = ctx.forms(0, 1)
    if isinstance(forms, UnknownFact):
        return forms
    params, indices = forms
    if indices.factors or (not indices.is_replicated and indices.rows is None):
        return ctx.unknown("its indices depend on sums over the batch")
    if batch_dims:
        return _gather_in_batches(ctx, params, indices)
    if params.rows is None and indices.rows is None:
        return params
    if params.rows is None:
        if not params.is_replicated:
            return ctx.unknown("it gathers from sums over the batch for each example")
        return with_result_axis(ctx, replace(indices, factors=params.factors), 1)
    if indices.rows is not None or params.rows.axis == axis:
        return _by_position(ctx, "it takes rows of the batch by position within the shard")
    return with_result_axis(ctx, params)


def _by_position(ctx: OpContext, why: str) -> UnknownFact:
    unknown = ctx.unknown(why)
    return unknown if ctx.constant(1) is None else SelectedByPosition(unknown.reason)


def _gather_special(ctx: OpContext) -> Fact | None:
    """Gathers along axis 0 from sparse indices, distinct ids, sampled classes or permutations; None for any other."""
    params, indices = ctx.facts[0], ctx.facts[1]
    if isinstance(params, Coordinates) and isinstance(indices, Positions):
        return kept(ctx, indices, params)
    if isinstance(indices, RowsWithTail):
        return of_both(lambda part: _gather(part, 0, 0), ctx, 1)
    if isinstance(params, Positions) and isinstance(indices, Positions) and _fit(indices.within, params.entries):
        return Positions(params.within, indices.entries)
    if isinstance(indices, Permutation):
        return permuted_by(ctx, indices)
    return looked_up(ctx)


def _fit(left: Sharded, right: Sharded) -> bool:
    """Returns True if rows match as far as known; tensors that match have equal numbers of rows per example."""
    return same_rows(left, right) and (None in (left.per, right.per) or left.per == right.per)


def _at_random_positions(ctx: OpContext, axis: int) -> Fact:
    """Gathers at positions that each replica draws for all its examples: rows from rows, else noise."""
    params, places = ctx.form(0), ctx.facts[1]
    if isinstance(params, Form) and params.rows is not None and params.rows.axis != axis:
        return with_result_axis(ctx, params)
    if params == REPLICATED:
        return places
    return UnknownFact(params.reason if isinstance(params, UnknownFact) else form_of(places).reason)  # type: ignore[union-attr]


def where(ctx: OpContext) -> Fact:
    """The op Where: the positions of True elements; row indices for a vector over the examples, else coordinates."""
    form = ctx.form(0)
    if isinstance(form, UnknownFact) or form.is_replicated:
        return form
    if form.rows is not None and form.rows.axis == 0 and not form.factors and not form.rows.order:
        is_vector = ctx.rank(0) == 1
        mask = _in_order(ctx) if is_vector else ctx.inputs[0]
        result = Positions(form.rows, elements_of(ctx.scope.same_as(("where", is_vector, mask), ctx.named())))
        return result if is_vector else Coordinates(result)
    return ctx.unknown("it returns positions within the replica's shard of the batch")


def _in_order(ctx: OpContext) -> object:
    """Returns a key for the elements of a vector in order; equal keys mean equal values."""
    tensor = ctx.inputs[0]
    while (node := ctx.scope.producer(tensor)) is not None and node.op in having(Trait.IDENTITY | Trait.RESHAPES):
        tensor = tensor_name(node.input[0])
    return _key_of(ctx, tensor)


def _key_of(ctx: OpContext, tensor: str) -> object:
    """Returns a key for a mask: comparisons of the same tensors and constants have equal keys."""
    node, value = ctx.scope.producer(tensor), ctx.scope.constant(tensor)
    if value is not None and value.size == 1:
        return str(value.dtype), value.item()
    if node is None or node.op not in _COMPARE:
        return tensor
    return node.op, *(_key_of(ctx, name) for name in data_inputs(node))


def _masked(ctx: OpContext, positions: Positions, axis: int) -> Fact:
    """Returns the rows selected by a mask over the same rows."""
    params, shape = ctx.form(0), ctx.shape(1)
    if isinstance(params, UnknownFact):
        return UnknownFact(params.reason)
    is_vector = shape.rank == 1 or (shape.rank == 2 and shape[1] == 1)
    if axis == 0 and is_vector and params.base == positions.within:
        return replace(params, base=positions.entries)
    if positions.entries == positions.within:
        return ctx.unknown("it takes rows by indices into other rows")
    return ctx.unknown("it takes rows by a mask over other rows")


def _gather_in_batches(ctx: OpContext, params: Form, indices: Form) -> Fact:
    if params.is_replicated and indices.is_replicated:
        return REPLICATED
    joined = divided(ctx, factor_rule(ctx), {0: params, 1: indices}) if params.rows and indices.rows else None
    if isinstance(joined, Divided):
        return Form(joined.result() or joined.rows, params.factors, joined.mixed_at)
    return ctx.unknown("its values and its indices do not have the examples along the same axis")


def gather_nd(ctx: OpContext) -> Fact:
    """GatherNd, ResourceGatherNd: the last axis of the indices holds one index."""
    result = element_of_each(ctx) or values_at(ctx)
    if result is not None:
        return result
    forms, rank = ctx.forms(0, 1), ctx.rank(1)
    if isinstance(forms, UnknownFact):
        return forms
    params, indices = forms
    looks_up = (
        params.is_replicated and indices.rows is not None and not indices.factors and not ctx.number("batch_dims")
    )
    if looks_up and rank is not None and indices.rows is not None and indices.rows.axis != rank - 1:
        return indices
    if params.rows is None and indices.is_replicated:
        return params
    return _by_position(ctx, "it takes elements of the batch by position within the shard")


def one_hot(ctx: OpContext) -> Fact:
    """OneHot: adds an axis, by default as the last one."""
    indices = ctx.form(0)
    if isinstance(indices, UnknownFact):
        return indices
    if any(form_of(fact) != REPLICATED for fact in ctx.facts[1:]):
        return ctx.unknown("its depth or its values are not replicated")
    if indices.rows is None or indices.factors:
        return REPLICATED if indices.is_replicated else ctx.unknown("its indices are sums over the batch")
    return with_result_axis(ctx, indices)


def table_lookup(ctx: OpContext) -> Fact:
    """LookupTableFindV2: looks up each key independently."""
    if form_of(ctx.facts[2]) != REPLICATED:
        return ctx.unknown("its default value depends on the batch")
    keys = ctx.form(1)
    return (
        keys if isinstance(keys, UnknownFact) or not keys.factors else ctx.unknown("its keys are sums over the batch")
    )


_COMPARE = having(Trait.COMPARISON | Trait.LOGIC)

RULES: dict[str, Rule] = {
    "GatherV2": gather,
    **dict.fromkeys(["Gather", "ResourceGather"], gather_first_axis),
    **dict.fromkeys(["GatherNd", "ResourceGatherNd"], gather_nd),
    "Where": where,
    "OneHot": one_hot,
    "LookupTableFindV2": table_lookup,
}
