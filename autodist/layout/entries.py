"""Rules for sparse tensors and segments: entries that belong to examples, each with its example's row index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autodist.graph.ops import Trait, having
from autodist.layout.by_factors import by_factors
from autodist.layout.combine import same_rows
from autodist.layout.facts import (
    REPLICATED,
    Base,
    Coordinates,
    DistinctIndices,
    DistinctRows,
    Fact,
    Form,
    Positions,
    UnknownFact,
    elements_of,
    form_of,
    with_axis,
)
from autodist.layout.lengths import is_length_of
from autodist.layout.op_context import OpContext, Rule, op_names, tensor_name

_LAST_MAY_BE_EMPTY = (
    "it makes no row for examples without entries at the end of a shard of the batch; use "
    "tf.nn.safe_embedding_lookup_sparse, tf.sparse.fill_empty_rows, or a number of segments (as "
    "in tf.math.unsorted_segment_sum), which make one for each"
)


def are_entries(form: Fact, positions: Positions) -> bool:
    """Returns True if a tensor has one row for each index in `positions`."""
    return isinstance(form, Form) and form.base == positions.entries


def with_columns(ctx: OpContext, indices: Sequence[int]) -> Coordinates | None:
    """Returns the coordinates formed by row indices as the first column of a matrix, or None."""
    first = ctx.facts[indices[0]]
    if not isinstance(first, Positions):
        return None
    others = [form_of(ctx.facts[index]) for index in indices[1:]]
    fits = all(isinstance(f, Form) and not f.factors and are_entries(f, first) for f in others)
    return Coordinates(first) if fits and others else None


def column(ctx: OpContext, coordinates: Coordinates) -> Fact:
    """x[:, k], x[:, k:] of coordinates: the examples' row indices, or the entries' positions within an example."""
    if ctx.rank(0) != 2:
        return ctx.unknown("the columns that it selects from a sparse tensor's indices are not known")
    masks = {name: ctx.number(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    begin, end, stride = (ctx.integers(index) for index in (1, 2, 3))
    plain = not masks["ellipsis"] and not masks["new_axis"] and masks["begin"] & masks["end"] & 1
    if not plain or masks["shrink_axis"] & 1 or begin is None or end is None or stride != [1, 1] or len(begin) != 2:
        return ctx.unknown("the columns that it selects from a sparse tensor's indices are not known")
    first = 0 if masks["begin"] & 2 else begin[1]
    if first == 0 and masks["shrink_axis"] & 2:
        return coordinates.positions
    if first == 0 and masks["end"] & 2:
        return coordinates
    if first is not None and first > 0:
        return Form(coordinates.positions.entries)
    return ctx.unknown("the columns that it selects from a sparse tensor's indices are not known")


def kept(ctx: OpContext, positions: Positions, coordinates: Coordinates) -> Fact:
    """Returns the coordinates of the entries that a mask selects."""
    if positions.within == coordinates.positions.entries:
        return Coordinates(Positions(coordinates.positions.within, positions.entries))
    return ctx.unknown("it selects entries by a mask over other entries")


def values_at(ctx: OpContext) -> Fact | None:
    """GatherNd: the elements of a batch at the coordinates of its entries; None for any other gather."""
    positions, params = _rows_of(ctx, 1), ctx.form(0)
    if positions is None or not isinstance(params, Form) or ctx.number("batch_dims"):
        return None
    return replace(params, base=positions.entries) if params.base == positions.within else None


def _rows_of(ctx: OpContext, index: int) -> Positions | None:
    """Returns the row index of each entry, from a matrix of coordinates, or of row indices alone; else None."""
    fact, shape = ctx.facts[index], ctx.shape(index)
    if isinstance(fact, Coordinates):
        return fact.positions
    return fact if isinstance(fact, Positions) and shape.rank == 2 and shape[1] == 1 else None


def to_dense(ctx: OpContext) -> Fact:
    """SparseToDense (positions, shape, values, default value)."""
    coordinates = ctx.facts[0]
    return _dense(ctx, coordinates.positions if isinstance(coordinates, Coordinates) else None, 1, (2, 3))


def scatter(ctx: OpContext) -> Fact:
    """ScatterNd (positions, values, shape): positions that are data of examples give a sum over the batch."""
    positions, values, shape = ctx.form(0), ctx.form(1), ctx.dims(2)
    is_fixed = form_of(ctx.facts[2]) == REPLICATED or (shape is not None and shape.is_replicated)
    if is_fixed and isinstance(ctx.facts[0], Form) and isinstance(positions, Form) and isinstance(values, Form):
        both_rows = positions.rows is not None and values.rows is not None and same_rows(values.rows, positions.rows)
        if both_rows and positions.rows and positions.rows.axis == 0 and not positions.factors:
            return Form(Base.PARTIAL_SUM, values.factors, positions.mixed_at or values.mixed_at)
    return _dense(ctx, _rows_of(ctx, 0), 2, (1,))


def _dense(ctx: OpContext, positions: Positions | None, shape: int, values: tuple[int, ...]) -> Fact:
    if positions is None:
        return _unknown_input(ctx)
    if not is_length_of(ctx, shape, positions.within):
        return ctx.unknown("the dense shape is not known to have the examples along the first axis")
    forms = ctx.forms(*values)
    if isinstance(forms, UnknownFact):
        return forms
    for form, index in zip(forms, values, strict=True):
        if form.factors or not (are_entries(form, positions) or (form == REPLICATED and ctx.is_uniform(index))):
            return ctx.unknown("its values are not entries of examples")
    return Form(positions.within, mixed_at=next((form.mixed_at for form in forms if form.mixed_at), None))


def split_strings(ctx: OpContext) -> list[Fact]:
    """StringSplitV2 of a vector of strings: coordinates of the words, the words, and the dense shape."""
    texts = ctx.form(0)
    longest = ctx.unknown("it depends on the number of words of the longest string in the replica's shard of the batch")
    if not isinstance(texts, Form) or texts.rows is None or texts.factors or texts.rows.order:
        return [_unknown_input(ctx), _unknown_input(ctx), longest]
    alike = ctx.scope.same_as(("words", ctx.inputs[0], ctx.inputs[1]), ctx.named())
    words = Positions(texts.rows, elements_of(alike))
    return [Coordinates(words), Form(words.entries, mixed_at=texts.mixed_at), longest]


def cross(ctx: OpContext) -> list[Fact]:
    """SparseCross of dense matrices: coordinates of the crosses of each row, the crosses, and the dense shape."""
    sparse, dense = ctx.number("N"), len(ctx.node.attr["dense_types"].list.type)
    forms = ctx.forms(*range(dense)) if not sparse and dense else ctx.unknown("it crosses sparse tensors")
    if isinstance(forms, UnknownFact):
        return [forms] * 3
    rows = {form.rows for form in forms}
    first = rows.pop()
    if first is None or rows or first.axis or first.order or any(form.factors for form in forms):
        return [ctx.unknown("its inputs do not have the same examples along the first axis")] * 3
    if not all(ctx.shape(k)[1] for k in range(dense)):  # then replicas make rows of the same length
        return [ctx.unknown("the number of its columns is not known")] * 3
    alike = ctx.scope.same_as(("crosses", *ctx.inputs[:dense]), ctx.named())
    crosses = Positions(first, elements_of(alike), True)
    mixed_at = next((form.mixed_at for form in forms if form.mixed_at), None)
    shape = ctx.unknown("it is the shape of the crosses of the replica's shard of the batch")
    return [Coordinates(crosses), Form(crosses.entries, mixed_at=mixed_at), shape]


def ragged_to_dense(ctx: OpContext) -> Fact:
    """RaggedTensorToTensor (shape, values, default value, number of rows, row of each value)."""
    if list(ctx.node.attr["row_partition_types"].list.s) != [b"FIRST_DIM_SIZE", b"VALUE_ROWIDS"]:
        return ctx.unknown("the row partition of its values is not supported")
    shape, positions, values = ctx.integers(0), ctx.facts[4], ctx.form(1)
    if shape is None or shape[0] != -1 or any(length is None or length < 0 for length in shape[1:]):
        return ctx.unknown(
            "its rows are as long as the longest row in the replica's shard of the batch; set a fixed "
            "length (output_sequence_length of TextVectorization, shape=[None, length] of to_tensor)"
        )
    if isinstance(positions, Positions) and is_length_of(ctx, 3, positions.within):
        if isinstance(values, Form) and not values.factors and are_entries(values, positions):
            if form_of(ctx.facts[2]) == REPLICATED:
                return Form(positions.within, mixed_at=values.mixed_at)
    return _unknown_input(ctx)


def ragged_counts(ctx: OpContext) -> Fact:
    """RaggedBincount (row splits, values, number of bins, weights)."""
    positions, values = _row_ids_of_splits(ctx, ctx.inputs[0]), ctx.form(1)
    if isinstance(positions, Positions) and isinstance(values, Form) and not values.factors:
        is_fixed = form_of(ctx.facts[2]) == REPLICATED or _is_constant(ctx, ctx.inputs[2])
        if are_entries(values, positions) and is_fixed and ctx.shape(3).num_elements() == 0:
            return Form(positions.within, mixed_at=values.mixed_at)
    return _unknown_input(ctx)


def row_lengths(ctx: OpContext) -> Fact:
    """DenseBincount (row of each value, number of rows, weights): the length of each row, or the sum of its weights."""
    positions, weights = ctx.facts[0], ctx.form(2)
    if isinstance(positions, Positions) and isinstance(weights, Form) and is_length_of(ctx, 1, positions.within):
        has_none = ctx.shape(2).num_elements() == 0
        if not ctx.flag("binary_output") and (has_none or are_entries(weights, positions)):
            return Form(positions.within, weights.factors, weights.mixed_at)
    return _unknown_input(ctx)


def _is_constant(ctx: OpContext, number: str) -> bool:
    """Returns True if a number of bins is constant because its bounds meet: minimum(most, maximum(least, x))."""
    minimum = ctx.scope.producer(number)
    if minimum is None or minimum.op != "Minimum":
        return False
    inputs = [tensor_name(name) for name in minimum.input[:2]]
    for most, inner in (inputs, inputs[::-1]):
        maximum = ctx.scope.producer(inner)
        if ctx.scope.constant(most) is not None and maximum is not None and maximum.op == "Maximum":
            least = [ctx.scope.constant(tensor_name(name)) for name in maximum.input[:2]]
            return any(value is not None and value >= ctx.scope.constant(most) for value in least)
    return False


def _row_ids_of_splits(ctx: OpContext, splits: str) -> Fact | None:
    """Returns the row of each value behind row splits made by RaggedTensor.from_value_rowids; None for other splits."""
    tensor = splits
    for op, operand in (("ConcatV2", 1), ("Cumsum", 0), ("DenseBincount", 0), ("Reshape", 0)):
        node = ctx.scope.producer(tensor)
        while node is not None and node.op in having(Trait.IDENTITY | Trait.CASTS):
            node = ctx.scope.producer(tensor_name(node.input[0]))
        if node is None or node.op != op:
            return None
        tensor = tensor_name(node.input[operand])
    return ctx.scope.fact(tensor)


def sparse_matmul(ctx: OpContext) -> Fact:
    """SparseTensorDenseMatMul (positions, values, shape, matrix): one of the two operands is replicated."""
    dense = ctx.form(3)
    if isinstance(dense, Form) and all(form_of(fact) == REPLICATED for fact in ctx.facts[:3]):
        if dense.rows is None:
            return dense  # a linear function of it
        is_behind = dense.rows.axis == (0 if ctx.flag("adjoint_b") else 1)
        return with_axis(dense, 1) if is_behind else ctx.unknown("it sums examples by position within the shard")
    if form_of(ctx.facts[3]) == REPLICATED and not ctx.flag("adjoint_a"):
        return _dense(ctx, _rows_of(ctx, 0), 2, (1,))
    return _unknown_input(ctx)


def sparse_reduce(ctx: OpContext) -> Fact:
    """SparseReduceSum, SparseReduceMax (positions, values, shape, axes): the axes must not include the batch axis."""
    axes, rank = ctx.constant(3), ctx.shape(0)[1] if ctx.rank(0) == 2 else None
    if axes is None or rank is None or any(int(axis) % rank == 0 for axis in axes.reshape(-1)):
        return _unknown_input(ctx)
    return _dense(ctx, _rows_of(ctx, 0), 2, (1,))


def ctc_loss(ctx: OpContext) -> list[Fact]:
    """CTCLoss: logits with the examples along the second axis, labels as positions and values, lengths."""
    coordinates, forms = ctx.facts[1], ctx.forms(0, 2, 3)
    if isinstance(coordinates, Coordinates) and not isinstance(forms, UnknownFact):
        logits, labels, lengths = forms
        within = coordinates.positions.within
        same_examples = logits.base == replace(within, axis=1) and are_entries(labels, coordinates.positions)
        same_lengths = lengths.base == within or (lengths == REPLICATED and ctx.is_uniform(3))
        if same_examples and same_lengths and not any(form.factors for form in forms):
            mixed_at = next((form.mixed_at for form in forms if form.mixed_at), None)
            return [Form(within, mixed_at=mixed_at), Form(replace(within, axis=1), mixed_at=mixed_at)]
    return [_unknown_input(ctx)] * 2


def reshape_sparse(ctx: OpContext) -> list[Fact]:
    """SparseReshape (positions, shape, new shape): the batch axis stays first."""
    coordinates, new = ctx.facts[0], ctx.dims(2)
    if isinstance(coordinates, Coordinates) and new is not None:
        within = coordinates.positions.within
        if is_length_of(ctx, 1, within) and is_length_of(ctx, 2, within):
            return [coordinates, new]
    reason = ctx.unknown("the examples of the sparse tensor are not known to stay along its first axis")
    return [reason, ctx.facts[2]]


def fill_empty_rows(ctx: OpContext) -> list[Fact]:
    """SparseFillEmptyRows (positions, values, shape, value for empty rows)."""
    coordinates, values = ctx.facts[0], ctx.form(1)
    if isinstance(coordinates, Coordinates) and is_length_of(ctx, 2, coordinates.positions.within):
        within = coordinates.positions.within
        if are_entries(values, coordinates.positions) and form_of(ctx.facts[3]) == REPLICATED and ctx.rank(3) == 0:
            assert isinstance(values, Form)
            alike = ctx.scope.same_as(("filled", coordinates), ctx.named(1))
            filled = Positions(within, elements_of(alike), True)
            row_numbers = ctx.unknown("it numbers the entries within the replica's shard of the batch")
            return [Coordinates(filled), Form(filled.entries, mixed_at=values.mixed_at), Form(within), row_numbers]
    return [ctx.unknown("its entries are not known to belong to the examples of its shape")] * 4


def segments(ctx: OpContext) -> Fact | list[Fact]:
    """SegmentSum and similar ops (data, ascending segment of each row)."""
    return _by_example(ctx, None)


def sparse_segments(ctx: OpContext) -> Fact | list[Fact]:
    """SparseSegmentSum and similar ops (data, selected rows, segment of each selected row)."""
    number = 3 if ctx.node.op.endswith("NumSegments") else None
    data, ids, row_ids = ctx.facts[0], ctx.facts[1], ctx.facts[2]
    if isinstance(data, Form) and data.rows is not None and form_of(row_ids) == REPLICATED:
        return by_factors(ctx)
    if isinstance(row_ids, Positions):
        of_different = isinstance(data, DistinctRows) and isinstance(ids, DistinctIndices) and ids.of == data.of
        taken = ids.rows if of_different and isinstance(ids, DistinctIndices) else form_of(ids)
        looks_up = of_different or form_of(data) == REPLICATED
        if looks_up and isinstance(taken, Form) and not taken.factors and are_entries(taken, row_ids):
            return _one_row_per_example(ctx, row_ids, taken, number)
    return _unknown_input(ctx)


def unsorted_segments(ctx: OpContext) -> Fact | list[Fact] | None:
    """UnsortedSegmentSum and similar ops with one segment per example; None for other segments."""
    return _by_example(ctx, 2) if isinstance(ctx.facts[1], Positions) else None


def _by_example(ctx: OpContext, number: int | None) -> Fact | list[Fact]:
    """Returns the layout of segment reductions of data; `number` is the input with the number of segments."""
    form, positions = ctx.form(0), ctx.facts[1]
    if isinstance(form, Form) and form.rows is not None and form_of(positions) == REPLICATED:
        return by_factors(ctx)
    if isinstance(positions, Positions) and isinstance(form, Form) and are_entries(form, positions):
        if form.factors and not ctx.node.op.endswith("Sum"):
            return ctx.unknown("it is not linear in rows that are scaled by sums over the batch")
        return _one_row_per_example(ctx, positions, form, number)
    return _unknown_input(ctx)


def _one_row_per_example(ctx: OpContext, row_ids: Positions, form: Form, number: int | None) -> Fact:
    if number is None and not row_ids.covers:
        return ctx.unknown(_LAST_MAY_BE_EMPTY)
    if number is not None and not is_length_of(ctx, number, row_ids.within):
        return ctx.unknown("it is not known to return one segment per example")
    return Form(row_ids.within, form.factors, form.mixed_at)


def _unknown_input(ctx: OpContext) -> Fact:
    forms = [form_of(fact) for fact in ctx.facts]
    unknown = next((form for form in forms if isinstance(form, UnknownFact)), None)
    return (
        UnknownFact(unknown.reason) if unknown else ctx.unknown("its data and its segments do not belong to examples")
    )


RULES: dict[str, Rule] = {
    "SparseToDense": to_dense,
    "ScatterNd": scatter,
    "StringSplitV2": split_strings,
    **dict.fromkeys(op_names("SparseCross SparseCrossV2 SparseCrossHashed"), cross),
    "RaggedBincount": ragged_counts,
    "RaggedTensorToTensor": ragged_to_dense,
    "SparseTensorDenseMatMul": sparse_matmul,
    **dict.fromkeys(["SparseReduceSum", "SparseReduceMax"], sparse_reduce),
    **dict.fromkeys(["CTCLoss", "CTCLossV2"], ctc_loss),
    "SparseReshape": reshape_sparse,
    "SparseFillEmptyRows": fill_empty_rows,
    **dict.fromkeys(op_names("SegmentSum SegmentMean SegmentMax SegmentMin SegmentProd"), segments),
    **dict.fromkeys(op_names("SparseSegmentSum SparseSegmentMean SparseSegmentSqrtN"), sparse_segments),
    **dict.fromkeys(
        op_names("SparseSegmentSumWithNumSegments SparseSegmentMeanWithNumSegments SparseSegmentSqrtNWithNumSegments"),
        sparse_segments,
    ),
}
