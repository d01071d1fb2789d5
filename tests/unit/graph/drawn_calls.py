"""Calls with drawn operands, for each op that has a factor rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from autodist.graph.ops import FACTORED
from tests.unit.graph.op_calls import Call, Draw


def image(draw: Draw, dtype: str = "float64") -> np.ndarray:
    return draw.floats(draw.size(), 4, 4, 3, dtype=dtype)


def volume(draw: Draw, dtype: str = "float64") -> np.ndarray:
    return draw.floats(draw.size(), 4, 4, 4, 2, dtype=dtype)


WINDOW = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
CUBE = {"ksize": [1, 2, 2, 2, 1], "strides": [1, 2, 2, 2, 1], "padding": "SAME"}
STRIDES = {"strides": [1, 1, 1, 1], "padding": "SAME"}
STRIDES_3D = {"strides": [1, 1, 1, 1, 1], "padding": "SAME"}


def square(draw: Draw, size: int = 3) -> np.ndarray:
    return draw.floats(*draw.sizes(), size, size) + 3 * np.eye(size)


def positive(draw: Draw) -> np.ndarray:
    half = square(draw)
    return half @ np.swapaxes(half, -1, -2)


def of_matrix(op: str, **attributes: object) -> Callable[[Draw], Call]:
    return lambda d: Call(op, [positive(d)], attributes)


def reduction(op: str, dtype: type = float) -> Callable[[Draw], Call]:
    def made(d: Draw) -> Call:
        value = (d.floats(*d.sizes(1, 3)) * 4 - 2).astype(dtype)
        axes = [k for k in range(value.ndim) if d.choose(True, False)]
        return Call(op, [value, np.array(axes, "int32")], {"keep_dims": d.choose(True, False)})

    return made


def arg_extreme(op: str) -> Callable[[Draw], Call]:
    return lambda d: Call(op, [d.floats(*d.sizes(1, 3)), np.int32(d.choose(0, -1))])


def along(op: str, last: Sequence[int] = (4,), dtype: str = "float64", **attributes: object) -> Callable[[Draw], Call]:
    """An op along the last axes, whose lengths are `last`."""
    return lambda d: Call(op, [d.floats(*d.sizes(), *last, dtype=dtype)], attributes)


def fourier(op: str, axes: int, *lengths: int) -> Callable[[Draw], Call]:
    def made(d: Draw) -> Call:
        value = d.floats(*d.sizes(1), *[4] * axes)
        if op.startswith("RFFT"):
            return Call(op, [value, np.array(lengths, "int32")], {"Tcomplex": tf.complex128})
        value = value.astype("complex128")
        return Call(op, [value, np.array(lengths, "int32")], {"Treal": tf.float64}) if lengths else Call(op, [value])

    return made


def moved(op: str, parameter: Callable[[Draw, int], object], **attributes: object) -> Callable[[Draw], Call]:
    """An op that moves the elements of one operand, with a parameter that depends on its rank."""

    def made(d: Draw) -> Call:
        value = d.floats(*d.sizes(1, 3))
        return Call(op, [value, parameter(d, value.ndim)], attributes)

    return made


def permutation(d: Draw, rank: int) -> np.ndarray:
    return np.array(d.choose(range(rank), range(rank)[::-1], [*range(1, rank), 0]), "int32")


def paddings(d: Draw, rank: int) -> np.ndarray:
    return np.array([d.choose([0, 0], [1, 0], [1, 1]) for _ in range(rank)], "int32")


def multiples(d: Draw, rank: int) -> np.ndarray:
    return np.array([d.choose(1, 2) for _ in range(rank)], "int32")


def axis_of(d: Draw, rank: int) -> np.int32:
    return np.int32(d.choose(*range(-rank, rank)))


def rolled(d: Draw) -> Call:
    value = d.floats(*d.sizes(1, 3))
    return Call("Roll", [value, np.array([1], "int32"), np.array([axis_of(d, value.ndim)])])


def squeezed(d: Draw) -> Call:
    shape = [*d.sizes(1, 2), 1, *d.sizes(0, 1)]
    return Call("Squeeze", [d.floats(*shape)], {"axis": [shape.index(1)]})


def sliced(d: Draw) -> Call:
    shape = d.sizes(1, 3)
    begin = np.array([d.choose(0, 1) for _ in shape], "int32")
    return Call("Slice", [d.floats(*shape), begin, np.array([d.choose(-1, 1) for _ in shape], "int32")])


def strided(d: Draw) -> Call:
    """x[1:], x[..., 0], x[:, None] and so on."""
    value = d.floats(3, 4, 2)
    entries = d.choose("t", "tf", "f.", ".s", "fna", "nf.s", "nfs", "fsn", ".nf", "fft")
    bits = {kind: sum(1 << k for k, entry in enumerate(entries) if entry == kind) for kind in "tfns.a"}
    begin = np.array([1 if entry in "ts" else 0 for entry in entries], "int32")
    end = np.array([2 if entry in "ts" else 0 for entry in entries], "int32")
    whole = bits["f"] | bits["a"]
    masks = {"begin_mask": whole, "end_mask": whole | bits["t"], "ellipsis_mask": bits["."]}
    masks |= {"new_axis_mask": bits["n"], "shrink_axis_mask": bits["s"]}
    return Call("StridedSlice", [value, begin, end, np.ones(len(entries), "int32")], masks)


def concatenated(op: str) -> Callable[[Draw], Call]:
    def made(d: Draw) -> Call:
        shape = d.sizes(1, 3)
        parts, axis = [d.floats(*shape), d.floats(*shape)], axis_of(d, len(shape))
        return Call(op, [axis, *parts] if op == "Concat" else [*parts, axis])

    return made


def packed(d: Draw) -> Call:
    shape = d.sizes(1, 2)
    return Call("Pack", [d.floats(*shape), d.floats(*shape)], {"axis": d.choose(*range(-len(shape) - 1, len(shape)))})


def divided_along(op: str) -> Callable[[Draw], Call]:
    def made(d: Draw) -> Call:
        shape = [4, *d.sizes(0, 2)]
        at = d.choose(*range(len(shape)))
        shape[0], shape[at] = shape[at], shape[0]
        if op == "Unpack":
            return Call(op, [d.floats(*shape)], {"num": 4, "axis": at})
        if op == "Split":
            return Call(op, [np.int32(at), d.floats(*shape)], {"num_split": 2})
        return Call(op, [d.floats(*shape), np.array([1, 3], "int32"), np.int32(at)], {"num_split": 2})

    return made


def gathered(d: Draw) -> Call:
    batch = d.sizes(0, 1)
    value = d.floats(*batch, *d.sizes(0, 1), 4, *d.sizes(0, 1))
    axis = value.shape.index(4, len(batch))
    indices = d.integers(*batch, *d.sizes(0, 2))
    return Call("GatherV2", [value, indices, np.int32(axis)], {"batch_dims": len(batch)})


def one_hot(d: Draw) -> Call:
    indices = d.integers(*d.sizes(1, 2))
    return Call(
        "OneHot",
        [indices, np.int32(3), np.float64(2), np.float64(-1)],
        {"axis": d.choose(*range(-1, indices.ndim + 1))},
    )


def segments(op: str) -> Callable[[Draw], Call]:
    def made(d: Draw) -> Call:
        rows = d.size()
        data = d.floats(rows, *d.sizes(0, 2))
        if op.startswith("Unsorted"):
            rows_shape = data.shape[: d.choose(*range(1, data.ndim + 1))]
            return Call(op, [data, d.integers(*rows_shape), np.int32(3)])
        return Call(op, [data, np.sort(d.integers(rows))])

    return made


def sparse_segments(op: str) -> Callable[[Draw], Call]:
    def made(d: Draw) -> Call:
        data, number = d.floats(3, *d.sizes(0, 2)), [np.int32(3)] * op.endswith("NumSegments")
        return Call(op, [data, d.integers(4), np.sort(d.integers(4)), *number])

    return made


def matmul(d: Draw) -> Call:
    m, k, n, a, b = d.size(), d.size(), d.size(), d.choose(True, False), d.choose(True, False)
    left, right = d.floats(*((k, m) if a else (m, k))), d.floats(*((n, k) if b else (k, n)))
    return Call("MatMul", [left, right], {"transpose_a": a, "transpose_b": b})


def batch_matmul(op: str) -> Callable[[Draw], Call]:
    def made(d: Draw) -> Call:
        lead, m, k, n, a, b = d.sizes(), d.size(), d.size(), d.size(), d.choose(True, False), d.choose(True, False)
        other = lead if op == "BatchMatMul" else d.choose(lead, lead[1:], tuple(1 for _ in lead))
        left, right = d.floats(*lead, *((k, m) if a else (m, k))), d.floats(*other, *((n, k) if b else (k, n)))
        types = {"Ta": left.dtype, "Tb": left.dtype, "Tout": left.dtype} if op == "BatchMatMulV3" else {}
        return Call(op, [left, right], {"adj_x": a, "adj_y": b, **({"Tout": tf.float64} if types else {})})

    return made


def einsum(d: Draw) -> Call:
    lengths = {letter: d.size() for letter in "abcd"}
    equation = d.choose(
        "ab,bc->ac", "abc,cd->abd", "ab,ab->", "ba->ab", "aab->b", "ab,cb->ca", "a...,ab->...b", "abc->b"
    )
    terms = equation.partition("->")[0].split(",")
    shapes = [[lengths["d"] if letter == "." else lengths[letter] for letter in t.replace("...", ".")] for t in terms]
    return Call("Einsum", [d.floats(*shape) for shape in shapes], {"equation": equation})


def tridiagonal(d: Draw) -> Call:
    lead, m = d.sizes(), 3
    return Call("TridiagonalMatMul", [*[d.floats(*lead, 1, m) for _ in range(3)], d.floats(*lead, m, d.size())])


def tridiagonal_solution(d: Draw) -> Call:
    lead, m = d.sizes(), 3
    return Call("TridiagonalSolve", [d.floats(*lead, 3, m) + np.array([[0], [3], [0]]), d.floats(*lead, m, d.size())])


def solution(op: str) -> Callable[[Draw], Call]:
    def made(d: Draw) -> Call:
        matrix = square(d)
        return Call(op, [matrix, d.floats(*matrix.shape[:-1], d.size())])

    return made


def with_diagonal(op: str) -> Callable[[Draw], Call]:
    def made(d: Draw) -> Call:
        matrix = square(d)
        if op == "MatrixSetDiag":
            return Call(op, [matrix, d.floats(*matrix.shape[:-1])])
        lengths, which = diagonals(d)
        return Call(op, [matrix, d.floats(*matrix.shape[:-2], *lengths, matrix.shape[-1]), which])

    return made


def diagonals(d: Draw) -> tuple[list[int], np.ndarray]:
    """Returns the length of the axis of several diagonals of a 3 x 3 matrix, if it has one, and their positions."""
    count = d.size(1)
    return [count] * (count > 1), np.array([-(count // 2), (count - 1) // 2], "int32")


def matrix_of_diagonals(op: str) -> Callable[[Draw], Call]:
    def made(d: Draw) -> Call:
        lengths, which = diagonals(d)
        return Call(op, [d.floats(*d.sizes(), *lengths, 3), which, np.int32(3), np.int32(3), np.float64(0)])

    return made


def quantized(op: str) -> Callable[[Draw], Call]:
    """A value in a fixed range or in its own, of the whole or of each slice along an axis."""

    def made(d: Draw) -> Call:
        value = d.floats(*d.sizes(1, 3))
        axis = d.choose(-1, *range(value.ndim))
        slices = value.shape[axis : axis + 1] if axis >= 0 else ()
        bounds = [-d.floats(*slices), d.floats(*slices)]
        is_v3 = op.endswith("3")  # the others do not run with ranges for slices
        has_range = d.choose(True, False) if axis < 0 or is_v3 else False
        return Call(op, [value, *bounds, *[np.int32(8)] * is_v3], {"range_given": has_range, "axis": axis})

    return made


def convolution(op: str) -> Callable[[Draw], Call]:
    def made(d: Draw) -> Call:
        if op == "Conv3D":
            return Call(op, [volume(d), d.floats(2, 2, 2, 2, d.size())], STRIDES_3D)
        groups = d.choose(1, 3) if op == "Conv2D" else 1
        return Call(op, [image(d), d.floats(2, 2, 3 // groups, 3)], STRIDES)

    return made


def convolution_gradient(op: str) -> Callable[[Draw], Call]:
    def made(d: Draw) -> Call:
        value = volume(d) if "3D" in op else image(d)
        space, channels = value.ndim - 2, value.shape[-1]
        filters = d.floats(*[2] * space, channels, 1 if "Depthwise" in op else 2)
        out = d.floats(*value.shape[:-1], channels if "Depthwise" in op else 2)
        attributes = STRIDES_3D if "3D" in op else STRIDES
        if "Input" in op:
            return Call(op, [np.array(value.shape, "int32"), filters, out], attributes)
        return Call(op, [value, np.array(filters.shape, "int32"), out], attributes)

    return made


def pooling(op: str) -> Callable[[Draw], Call]:
    def made(d: Draw) -> Call:
        value = volume(d, "float32") if "3D" in op else image(d)
        attributes = CUBE if "3D" in op else WINDOW
        if op == "MaxPoolV2":
            sizes = [np.array(attributes[name], "int32") for name in ("ksize", "strides")]
            return Call(op, [value, *sizes], {"padding": "SAME"})
        if not op.endswith("Grad"):
            return Call(op, [value], attributes)
        [pooled] = Call(op.removesuffix("Grad"), [value], attributes).run()
        gradient = d.floats(*pooled.shape, dtype=value.dtype.name)
        first = [np.array(value.shape, "int32")] if op.startswith("Avg") else [value, pooled]
        return Call(op, [*first, gradient], attributes)

    return made


def bias(d: Draw) -> tuple[np.ndarray, str]:
    return (image(d), d.choose("NHWC", "NCHW"))


def biased(d: Draw) -> Call:
    value, layout = bias(d)
    return Call("BiasAdd", [value, d.floats(value.shape[1 if layout == "NCHW" else -1])], {"data_format": layout})


def bias_gradient(d: Draw) -> Call:
    value, layout = bias(d)
    return Call("BiasAddGrad", [value], {"data_format": layout})


def of_classes(op: str) -> Callable[[Draw], Call]:
    def made(d: Draw) -> Call:
        rows = d.size()
        if op == "SoftmaxCrossEntropyWithLogits":
            return Call(op, [d.floats(rows, 3), d.floats(d.choose(1, rows), 3)])
        if op.startswith("InTopK"):
            value = d.floats(rows, 3, dtype="float32")
            return Call(
                op, [value, d.integers(rows), *[np.int32(2)] * (op == "InTopKV2")], {"k": 2} if op == "InTopK" else {}
            )
        return Call(op, [d.floats(rows, 3), d.integers(rows)])

    return made


def resized(op: str) -> Callable[[Draw], Call]:
    def made(d: Draw) -> Call:
        value = image(d, "float32")
        if op == "ScaleAndTranslate":
            return Call(op, [value, np.array([3, 5], "int32"), np.ones(2, "float32"), np.zeros(2, "float32")])
        if op == "ResizeNearestNeighborGrad":
            return Call(op, [value, np.array([3, 5], "int32")])
        if op.endswith("Grad"):
            return Call(op, [d.floats(len(value), 3, 5, 3, dtype="float32"), value])
        return Call(op, [value, np.array([3, 5], "int32")])

    return made


def projected(op: str) -> Callable[[Draw], Call]:
    def made(d: Draw) -> Call:
        value = image(d, "float32")
        transforms = d.floats(d.choose(1, len(value)), 8, dtype="float32")
        fill = [np.float32(0)] * op.endswith("3")
        return Call(op, [value, transforms, np.array([3, 5], "int32"), *fill], {"interpolation": "NEAREST"})

    return made


def bound(op: str) -> Callable[[Draw], Call]:
    return lambda d: Call(op, [np.sort(d.floats((rows := d.size()), 4)), d.floats(rows, 2)])


def selected(d: Draw) -> Call:
    shape = d.sizes(1, 3)
    condition = d.integers(*d.choose(shape, shape[:1]), below=2).astype(bool)
    return Call("Select", [condition, d.floats(*shape), d.floats(*shape)])


def broadcast(d: Draw) -> Call:
    shape = d.sizes(1, 3)
    value = d.floats(*d.choose(shape, shape[1:], (1, *shape[1:])))
    return Call("BroadcastTo", [value, np.array(shape, "int32")])


PATCHES = {"ksizes": [1, 2, 2, 1], "strides": [1, 1, 1, 1], "rates": [1, 1, 1, 1], "padding": "SAME"}
CUBES = {"ksizes": [1, 2, 2, 2, 1], "strides": [1, 1, 1, 1, 1], "padding": "SAME"}

CASES: dict[str, Callable[[Draw], Call]] = {
    "Select": selected,
    "BroadcastTo": broadcast,
    "EnsureShape": lambda d: Call("EnsureShape", [(x := d.floats(*d.sizes(1, 3)))], {"shape": [None] * x.ndim}),
    "FakeQuantWithMinMaxVars": lambda d: Call(
        "FakeQuantWithMinMaxVars", [d.floats(*d.sizes(1, 3), dtype="float32"), np.float32(0), np.float32(1)]
    ),
    "Bitcast": lambda d: Call("Bitcast", [d.floats(*d.sizes(1, 3))], {"type": tf.int64}),
    "ExpandDims": moved("ExpandDims", lambda d, rank: np.int32(d.choose(*range(-rank - 1, rank + 1)))),
    "Squeeze": squeezed,
    "Tile": moved("Tile", multiples),
    "Transpose": moved("Transpose", permutation),
    "ConjugateTranspose": moved("ConjugateTranspose", permutation),
    "ReverseV2": moved("ReverseV2", lambda d, rank: np.array([axis_of(d, rank)])),
    "Roll": rolled,
    "ReverseSequence": lambda d: Call(
        "ReverseSequence", [d.floats(3, 4, *d.sizes()), d.integers(3, below=4)], {"seq_dim": 1, "batch_dim": 0}
    ),
    **{op: moved(op, axis_of) for op in ("Cumsum", "Cumprod", "CumulativeLogsumexp")},
    "Slice": sliced,
    "StridedSlice": strided,
    "Pad": moved("Pad", paddings),
    "PadV2": lambda d: Call("PadV2", [(x := d.floats(*d.sizes(1, 3))), paddings(d, x.ndim), np.float64(2)]),
    "MirrorPad": moved("MirrorPad", paddings, mode="SYMMETRIC"),
    "MirrorPadGrad": lambda d: Call(
        "MirrorPadGrad", [d.floats(5, 5), np.array([[0, 0], [1, 1]], "int32")], {"mode": "REFLECT"}
    ),
    "OneHot": one_hot,
    "Pack": packed,
    "ConcatV2": concatenated("ConcatV2"),
    "Concat": concatenated("Concat"),
    **{op: divided_along(op) for op in ("Unpack", "Split", "SplitV")},
    "GatherV2": gathered,
    "Gather": lambda d: Call("Gather", [d.floats(4, *d.sizes()), d.integers(*d.sizes())]),
    "SpaceToDepth": lambda d: Call("SpaceToDepth", [image(d)], {"block_size": 2}),
    "DepthToSpace": lambda d: Call("DepthToSpace", [d.floats(d.size(), 2, 2, 4)], {"block_size": 2}),
    "MatrixBandPart": lambda d: Call("MatrixBandPart", [square(d), np.int64(1), np.int64(0)]),
    "MatrixDiag": along("MatrixDiag"),
    **{op: matrix_of_diagonals(op) for op in ("MatrixDiagV2", "MatrixDiagV3")},
    "MatrixDiagPart": of_matrix("MatrixDiagPart"),
    **{
        op: lambda d, op=op: Call(op, [square(d), d.choose(np.int32(0), np.array([0, 1], "int32")), np.float64(0)])
        for op in ("MatrixDiagPartV2", "MatrixDiagPartV3")
    },
    **{op: with_diagonal(op) for op in ("MatrixSetDiag", "MatrixSetDiagV2", "MatrixSetDiagV3")},
    **{op: reduction(op) for op in ("Sum", "Mean", "Max", "Min", "Prod", "EuclideanNorm")},
    **{op: reduction(op, bool) for op in ("Any", "All")},
    **{op: arg_extreme(op) for op in ("ArgMax", "ArgMin")},
    "L2Loss": lambda d: Call("L2Loss", [d.floats(*d.sizes(1, 3))]),
    **{f"Segment{kind}": segments(f"Segment{kind}") for kind in ("Sum", "Mean", "Max", "Min", "Prod")},
    **{f"UnsortedSegment{k}": segments(f"UnsortedSegment{k}") for k in ("Sum", "Max", "Min", "Prod")},
    **{
        op: sparse_segments(op)
        for kind in ("Sum", "Mean", "SqrtN")
        for op in (f"SparseSegment{kind}", f"SparseSegment{kind}WithNumSegments")
    },
    "MatMul": matmul,
    **{op: batch_matmul(op) for op in ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")},
    "Einsum": einsum,
    "Cross": lambda d: Call("Cross", [(x := d.floats(*d.sizes(1), 3)), x[::-1] + 1]),
    "TridiagonalMatMul": tridiagonal,
    "TridiagonalSolve": tridiagonal_solution,
    **{op: convolution(op) for op in ("Conv2D", "Conv3D")},
    "DepthwiseConv2dNative": lambda d: Call("DepthwiseConv2dNative", [image(d), d.floats(2, 2, 3, 2)], STRIDES),
    **{
        op: convolution_gradient(op)
        for op in (
            "Conv2DBackpropInput", "DepthwiseConv2dNativeBackpropInput", "Conv3DBackpropInputV2",
            "Conv2DBackpropFilter", "DepthwiseConv2dNativeBackpropFilter", "Conv3DBackpropFilterV2",
        )
    },
    "BiasAdd": biased,
    "BiasAddV1": lambda d: Call("BiasAddV1", [(value := image(d)), d.floats(value.shape[-1])]),
    "BiasAddGrad": bias_gradient,
    "Softmax": along("Softmax"),
    "LogSoftmax": along("LogSoftmax"),
    "TopKV2": lambda d: Call("TopKV2", [d.floats(*d.sizes(), 4), np.int32(2)]),
    **{op: along(op, (3,), "float32") for op in ("RGBToHSV", "HSVToRGB")},
    **{
        op: lambda d, op=op: Call(op, [d.floats(*d.sizes(0, 1), 3, 3, 3, dtype="float32"), np.float32(0.3)])
        for op in ("AdjustHue", "AdjustSaturation", "AdjustContrastv2")
    },
    "IsotonicRegression": lambda d: Call("IsotonicRegression", [d.floats(d.size(), 4)], {"output_dtype": tf.float64}),
    "FakeQuantWithMinMaxVarsPerChannel": lambda d: Call(
        "FakeQuantWithMinMaxVarsPerChannel",
        [d.floats(*d.sizes(), 3, dtype="float32"), np.zeros(3, "float32"), np.ones(3, "float32")],
    ),
    **{
        op: of_classes(op)
        for op in (
            "SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits", "InTopK", "InTopKV2",
        )
    },
    **{op: bound(op) for op in ("LowerBound", "UpperBound")},
    "LRN": lambda d: Call("LRN", [image(d, "float32")]),
    **{
        op: pooling(op)
        for op in (
            "AvgPool", "AvgPool3D", "MaxPool", "MaxPoolV2", "MaxPool3D",
            "AvgPoolGrad", "AvgPool3DGrad", "MaxPoolGrad", "MaxPool3DGrad",
        )
    },
    "MaxPoolWithArgmax": lambda d: Call(
        "MaxPoolWithArgmax", [image(d)], {**WINDOW, "include_batch_in_index": d.choose(True, False)}
    ),
    **{f"QuantizeAndDequantizeV{k}": quantized(f"QuantizeAndDequantizeV{k}") for k in (2, 3, 4)},
    "Dilation2D": lambda d: Call("Dilation2D", [image(d), d.floats(2, 2, 3)], {**STRIDES, "rates": [1, 1, 1, 1]}),
    "ExtractImagePatches": lambda d: Call("ExtractImagePatches", [image(d)], PATCHES),
    "ExtractVolumePatches": lambda d: Call("ExtractVolumePatches", [volume(d)], CUBES),
    **{
        op: resized(op)
        for op in (
            "ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic", "ResizeArea", "ScaleAndTranslate",
            "ResizeBilinearGrad", "ResizeBicubicGrad", "ResizeNearestNeighborGrad",
        )
    },
    **{op: projected(op) for op in ("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")},
    "FFT": fourier("FFT", 1),
    "IFFT": fourier("IFFT", 1),
    **{f"{kind}{axes}D": fourier(f"{kind}{axes}D", axes) for kind in ("FFT", "IFFT") for axes in (2, 3)},
    **{kind: fourier(kind, 1, 4) for kind in ("RFFT", "IRFFT")},
    **{f"{kind}{axes}D": fourier(f"{kind}{axes}D", axes, *[4] * axes) for kind in ("RFFT", "IRFFT") for axes in (2, 3)},
    **{
        op: of_matrix(op)
        for op in ("MatrixDeterminant", "LogMatrixDeterminant", "MatrixInverse", "Cholesky")
    },
    "MatrixSquareRoot": of_matrix("MatrixSquareRoot"),
    "MatrixLogarithm": lambda d: Call("MatrixLogarithm", [positive(d).astype("complex128")]),
    "SelfAdjointEigV2": of_matrix("SelfAdjointEigV2"),
    "Eig": of_matrix("Eig", Tout=tf.complex128),
    "Svd": of_matrix("Svd"),
    "Qr": of_matrix("Qr"),
    "Lu": of_matrix("Lu"),
    **{op: solution(op) for op in ("MatrixTriangularSolve", "MatrixSolve")},
}  # fmt: skip
"""For each op whose rule is not that of elementwise ops: a call with drawn shapes."""

NOT_RUN = {
    "ResourceGather": "it takes a variable; the rule is that of Gather",
    **dict.fromkeys(["BatchFFT", "BatchIFFT", "MatrixExponential", "TopK"], "TensorFlow has removed it"),
    "DebugIdentityV2": "it writes files",
    "DebugIdentityV3": "it writes files",
    "RefIdentity": "it takes a TensorFlow 1 variable",
    "AccumulateNV2": "TensorFlow has no implementation of it",
}
"""Ops of the column without a case, with the reason."""

SINGLE = {
    op
    for op in CASES
    if "Pool3D" in op or op.startswith(("RGB", "HSV", "Adjust", "Resize", "Scale", "Image", "LRN", "FakeQuant"))
}
"""Ops that compute in float32."""

ATTRIBUTES: dict[str, dict[str, object]] = {
    "Cast": {"DstT": tf.int32},
    "CheckNumerics": {"message": "a"},
    "CheckNumericsV2": {"message": "a"},
    "Bucketize": {"boundaries": [0.2, 0.6]},
    "StaticRegexFullMatch": {"pattern": "a"},
    "StaticRegexReplace": {"pattern": "a", "rewrite": "b"},
    "StringToHashBucketFast": {"num_buckets": 3},
    "StringToHashBucketStrong": {"num_buckets": 3, "key": [1, 2]},
    "StringToNumber": {"out_type": tf.float64},
    "Complex": {"Tout": tf.complex128},
    **{op: {"Tout": tf.float64} for op in ("Real", "Imag", "Angle", "ComplexAbs")},
}
DTYPES = (tf.float64, tf.float32, tf.int32, tf.bool, tf.complex128, tf.string)
ELEMENTWISE = sorted(op for op in FACTORED - CASES.keys() - NOT_RUN.keys())


def elementwise(draw: Draw, op: str) -> Call:
    """Returns a call of an elementwise op; two operands are broadcast where the op does so."""
    definition = op_def_registry.get(op)
    types = {a.name: a.allowed_values.list.type for a in definition.attr if a.type == "type"}
    arguments = [a for a in definition.input_arg for _ in range(2 if a.number_attr else 1)]
    shape = draw.sizes(1, 3)
    operands = []
    for argument in arguments:
        allowed = types.get(argument.type_attr) or [argument.type] if argument.type else types[argument.type_attr]
        dtype = next(dtype for dtype in DTYPES if not allowed or dtype.as_datatype_enum in allowed)
        operands.append(draw.floats(*shape) if dtype == tf.string else draw.floats(*shape).astype(dtype.as_numpy_dtype))
        if dtype == tf.string:
            operands[-1] = operands[-1].astype("S4")
        if dtype in (tf.int32, tf.bool):
            operands[-1] = draw.integers(*shape).astype(dtype.as_numpy_dtype) + (dtype == tf.int32)
    call = Call(op, operands, ATTRIBUTES.get(op, {}))
    if len(operands) < 2:
        return call
    at = draw.choose(*range(len(operands)))
    other = draw.choose((1, *shape[1:]), shape[1:], ())
    fewer = operands[at].reshape(-1)[: int(np.prod(other))].reshape(other)
    broadcast = Call(op, [*operands[:at], fewer, *operands[at + 1 :]], call.attributes)
    try:
        broadcast.run()
    except (tf.errors.InvalidArgumentError, ValueError):
        return call
    return broadcast
