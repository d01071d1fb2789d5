"""Factor rules of reductions, products and network layers, which depend on attributes or ranks of a node."""

from __future__ import annotations

from dataclasses import replace

from autodist.graph.ops.factor_rule import MOST_AXES, Axes, FactorFunction, FactorRule, OpView, ReducedBy, notation
from autodist.graph.ops.moves import from_left, of_one_operand, whole_at


def reduction(reduced: ReducedBy | None) -> FactorFunction:
    """Returns the rule of a reduction (value, axes); its partial results are combined by `reduced`."""

    def rule(op: OpView) -> FactorRule | None:
        axes = op.axes_listed(1, 0)
        if axes is None:
            return None
        before, keeps = from_left(op), op.flag("keep_dims")
        after = tuple(None if k in axes else k for k in before if keeps or k not in axes)
        return replace(of_one_operand(op, tuple(before), after), reduced=reduced)

    return rule


def of_all_elements(op: OpView) -> FactorRule | None:
    """L2Loss: a sum over all axes."""
    return of_one_operand(op, tuple(from_left(op)), ())


def segments(by: ReducedBy | None) -> FactorFunction:
    """Returns the rule of a segment reduction (data, segment of each row): the axes of the rows become one.

    Args:
        by: combines the results of parts of the rows; None if these have different numbers of segments.
    """

    def rule(op: OpView) -> FactorRule | None:
        depth, rank = op.rank(1), op.rank(0)
        if depth is None:
            return None
        rows = tuple(f"row{k}" if by else None for k in range(depth))
        inner = tuple(range(depth, MOST_AXES if rank is None else rank))
        rest = [None] * (len(op.inputs) - 2)
        return FactorRule(((*rows, *inner), rows, *rest), ((None, *inner),), by)

    return rule


def gather(op: OpView) -> FactorRule | None:
    """GatherV2 (values, indices, axis), Gather: the gathered axis is replaced by the axes of the indices."""
    depth, rank = op.rank(1), op.rank(0)
    axis = op.scalar(2) if len(op.inputs) > 2 else 0
    batch = op.number("batch_dims")
    if axis is None or depth is None or (rank is None and axis < 0):
        return None
    axis, batch = axis % (rank or MOST_AXES), batch + depth if batch < 0 else batch
    values = from_left(op)
    indices: Axes = (*values[:batch], *(f"index{k}" for k in range(batch, depth)))
    kept = whole_at(values, {axis})
    result: Axes = (*values[:axis], *indices[batch:], *values[axis + 1 :])
    return FactorRule((kept, indices, *[None] * (len(op.inputs) - 2)), (result,))


def matmul(op: OpView) -> FactorRule | None:
    """MatMul, BatchMatMul: leading axes are broadcast."""
    flags = ("transpose_a", "transpose_b") if op.node.op == "MatMul" else ("adj_x", "adj_y")
    left, right = "km" if op.flag(flags[0]) else "mk", "nk" if op.flag(flags[1]) else "kn"
    return notation(op, f"{left},{right}->mn" if op.node.op == "MatMul" else f"...{left},...{right}->...mn")


def einsum(op: OpView) -> FactorRule | None:
    """Einsum, whose equation is the notation of its rule."""
    return notation(op, op.text("equation"))


# -- diagonals ---------------------------------------------------------------------------------------------------------


def matrix_from_diagonals(op: OpView) -> FactorRule | None:
    """MatrixDiagV2 (diagonals, first and last diagonal): several diagonals lie along an axis of their own."""
    wanted = op.integers(1)
    if not wanted or None in wanted:
        return None
    return notation(op, "...*->...**" if wanted[0] == wanted[-1] else "...**->...**")


def matrix_with_diagonals(op: OpView) -> FactorRule | None:
    """MatrixSetDiag (matrix, diagonals): several diagonals lie along an axis of their own."""
    return notation(op, "...**,...*->...**" if op.rank(0) != op.rank(1) else "...**,...**->...**")


# -- network layers ----------------------------------------------------------------------------------------------------


def channels_first(op: OpView) -> bool:
    return op.text("data_format").startswith("NC")


def images(op: OpView, space: int, channel: str = "c") -> str:
    """Returns the axes of a batch of images with `space` axes of space: "b**c"."""
    return f"b{channel}{'*' * space}" if channels_first(op) else f"b{'*' * space}{channel}"


def bias_add(op: OpView) -> FactorRule | None:
    """BiasAdd (value, bias): the bias lies along the channels."""
    value = _biased(op)
    return None if value is None else FactorRule((value, ("c",)), (value,))


def bias_gradient(op: OpView) -> FactorRule | None:
    """BiasAddGrad: a sum over all axes except the channels."""
    value = _biased(op)
    return None if value is None else FactorRule((value,), (("c",),))


def _biased(op: OpView) -> Axes | None:
    rank = op.rank(0)
    if rank is None:
        return None
    factors = list(range(rank))
    channels = 1 if channels_first(op) else rank - 1
    return tuple("c" if k == channels else k for k in factors)


def pooling(space: int, *, values: int = 1, lengths: bool = False) -> FactorFunction:
    """Returns the rule of a pooling over `space` axes, or of its gradient, with `values` tensors of images."""

    def rule(op: OpView) -> FactorRule | None:
        image = images(op, space)
        return notation(op, ",".join([*["#"] * lengths, *[image] * values]) + f"->{image}")

    return rule


def pooling_with_positions(op: OpView) -> FactorRule | None:
    """MaxPoolWithArgmax: positions within each image, or within the whole batch of images."""
    return notation(op, "b***->b***,****" if op.flag("include_batch_in_index") else "b***->b***", None)


def quantization(op: OpView) -> FactorRule | None:
    """QuantizeAndDequantize (value, smallest, largest): an unspecified range is that of the value, or of each slice."""
    value, axis = from_left(op), op.number("axis")
    slices = (axis,) if axis >= 0 else ()
    kept = tuple(value) if op.flag("range_given") else whole_at(value, {*value} - {*slices})
    return FactorRule((kept, slices, slices, *[None] * (len(op.inputs) - 3)), (kept,))


def convolution(space: int) -> FactorFunction:
    """Returns the rule of a convolution (images, filter): input channels are summed, unless they are in groups."""

    def rule(op: OpView) -> FactorRule | None:
        i, o = _channels(op, images(op, space).index("c"))
        return notation(op, f"{images(op, space, i)},{'*' * space}{i}{o}->{images(op, space, o)}")

    return rule


def _channels(op: OpView, axis: int) -> tuple[str, str]:
    """Returns the factors of a filter's channels; grouped channels must be whole."""
    shapes = [op.shape(0), op.shape(1)]
    if None in (shapes[0].rank, shapes[1].rank):
        return "*", "*"
    given, taken = shapes[0][axis], shapes[1][-2]
    return ("i", "o") if given is not None and given == taken else ("*", "*")
