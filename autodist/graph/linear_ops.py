"""Which ops are linear, and in which of their operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LinearIn:
    """The operands in which an op is linear, by position; what it does with the others does not matter.

    Attributes:
        operands: the positions, from behind where negative; None: all.
        apart: whether it is linear in each while the others stay what they are, as a product is, or else in all of them
            together, as a sum is.
        but: positions that are left out of `operands`.
    """

    operands: tuple[int, ...] | None
    apart: bool = False
    but: tuple[int, ...] = ()

    def positions(self, count: int) -> list[int]:
        """Those of `count` operands."""
        chosen = range(count) if self.operands is None else self.operands
        left_out = {k % count for k in self.but if count}
        return [k for k in dict.fromkeys(k % count for k in chosen if -count <= k < count) if k not in left_out]


def _named(ops: str, rule: LinearIn) -> dict[str, LinearIn]:
    return dict.fromkeys(ops.split(), rule)


LINEAR: Mapping[str, LinearIn] = {
    # Sums, choices, and whatever puts tensors together.
    **_named("Add AddV2 AddN AccumulateNV2 Sub Pack ParallelConcat Merge RefMerge", LinearIn(None)),
    **_named("ConcatV2", LinearIn(None, but=(-1,))),
    **_named("Concat Select SelectV2", LinearIn(None, but=(0,))),
    **_named("BiasAdd BiasAddV1 Complex MatrixSetDiag TensorListConcatLists", LinearIn((0, 1))),
    **_named("MatrixSetDiagV2 MatrixSetDiagV3 TensorListPushBack TensorListScatterIntoExistingList", LinearIn((0, 1))),
    **_named("TensorListPushBackBatch", LinearIn((0, 1))),
    **_named("PadV2 TensorListSetItem TensorScatterAdd TensorScatterSub TensorScatterUpdate", LinearIn((0, 2))),
    **_named("SparseToDense", LinearIn((2, 3))),
    # One operand that is moved, added up, scaled.
    **_named(
        "Identity RefIdentity Snapshot StopGradient PreventGradient CheckNumerics CheckNumericsV2", LinearIn((0,))
    ),
    **_named(
        "EnsureShape PlaceholderWithDefault DebugIdentityV2 DebugIdentityV3 DeepCopy Neg Conj Real Imag", LinearIn((0,))
    ),
    **_named("Enter RefEnter Exit RefExit NextIteration RefNextIteration Switch RefSwitch", LinearIn((0,))),
    **_named("Reshape ExpandDims Squeeze Transpose ConjugateTranspose", LinearIn((0,))),
    **_named("Sum Mean SegmentSum SegmentMean UnsortedSegmentSum Cumsum SparseSegmentSum", LinearIn((0,))),
    **_named("SegmentSumV2", LinearIn((0,))),
    **_named("SparseSegmentMean SparseSegmentSqrtN SparseSegmentSumWithNumSegments", LinearIn((0,))),
    **_named("SparseSegmentMeanWithNumSegments SparseSegmentSqrtNWithNumSegments", LinearIn((0,))),
    **_named("SparseSegmentSumGrad SparseSegmentMeanGrad SparseSegmentSqrtNGrad", LinearIn((0,))),
    **_named("SparseSegmentSumGradV2 SparseSegmentMeanGradV2 SparseSegmentSqrtNGradV2", LinearIn((0,))),
    **_named("Slice StridedSlice Unpack SplitV GatherV2 Gather GatherNd DynamicPartition", LinearIn((0,))),
    **_named("Pad MirrorPad MirrorPadGrad Tile TileGrad BroadcastTo", LinearIn((0,))),
    **_named("ReverseV2 Reverse ReverseSequence Roll Diag DiagPart MatrixBandPart", LinearIn((0,))),
    **_named("MatrixDiag MatrixDiagPart MatrixDiagV2 MatrixDiagPartV2 MatrixDiagV3 MatrixDiagPartV3", LinearIn((0,))),
    **_named("BatchToSpace BatchToSpaceND SpaceToBatch SpaceToBatchND SpaceToDepth DepthToSpace", LinearIn((0,))),
    **_named("ExtractImagePatches ExtractVolumePatches AvgPool AvgPool3D DataFormatVecPermute", LinearIn((0,))),
    **_named("FFT FFT2D FFT3D IFFT IFFT2D IFFT3D RFFT RFFT2D RFFT3D IRFFT IRFFT2D IRFFT3D", LinearIn((0,))),
    **_named("FFTND IFFTND RFFTND IRFFTND", LinearIn((0,))),
    **_named("TensorListStack TensorListGetItem TensorListPopBack TensorListGather", LinearIn((0,))),
    **_named("TensorListFromTensor TensorListConcat TensorListConcatV2 TensorListResize", LinearIn((0,))),
    **_named("TensorListSplit TensorListScatter TensorListScatterV2", LinearIn((0,))),
    **_named("ResizeBilinear ResizeNearestNeighbor ResizeBicubic ResizeArea", LinearIn((0,))),
    **_named("ResizeBilinearGrad ResizeNearestNeighborGrad ResizeBicubicGrad ScaleAndTranslateGrad", LinearIn((0,))),
    **_named("CropAndResize CropAndResizeGradImage ScaleAndTranslate", LinearIn((0,))),
    **_named("Split ScatterNd", LinearIn((1,))),
    **_named("StridedSliceGrad", LinearIn((4,))),
    # What TensorFlow makes for gradients: linear in the one that comes in.
    **_named("ReluGrad Relu6Grad EluGrad SeluGrad LeakyReluGrad SoftplusGrad SoftsignGrad", LinearIn((0,))),
    **_named("BiasAddGrad FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3 LRNGrad", LinearIn((0,))),
    **_named("FakeQuantWithMinMaxArgsGradient FakeQuantWithMinMaxVarsGradient", LinearIn((0,))),
    **_named("FakeQuantWithMinMaxVarsPerChannelGradient QuantizeAndDequantizeV4Grad", LinearIn((0,))),
    **_named("TanhGrad SigmoidGrad SqrtGrad RsqrtGrad ReciprocalGrad InvGrad CholeskyGrad", LinearIn((1,))),
    **_named("AvgPoolGrad AvgPool3DGrad MaxPoolGradWithArgmax", LinearIn((1,))),
    **_named("MaxPoolGrad MaxPool3DGrad MaxPoolGradGrad MaxPool3DGradGrad MaxPoolGradGradWithArgmax", LinearIn((2,))),
    **_named("MaxPoolGradV2 MaxPoolGradGradV2 Dilation2DBackpropInput Dilation2DBackpropFilter", LinearIn((2,))),
    # Quotients and solutions, linear in what is divided.
    **_named("RealDiv Div DivNoNan Xdivy Xlogy Xlog1py", LinearIn((0,))),
    **_named("MatrixTriangularSolve MatrixSolve BatchMatrixTriangularSolve BatchMatrixSolve", LinearIn((1,))),
    **_named("TridiagonalSolve", LinearIn((1,))),
    # Products, linear in each factor.
    **_named("Mul MulNoNan MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 SparseMatMul Cross", LinearIn((0, 1), True)),
    **_named("Conv2D Conv3D Conv DepthwiseConv2dNative", LinearIn((0, 1), True)),
    **_named("Einsum", LinearIn(None, True)),
    **_named("SparseTensorDenseMatMul", LinearIn((1, 3), True)),
    **_named("Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput", LinearIn((1, 2), True)),
    **_named("Conv2DBackpropFilter Conv3DBackpropFilterV2", LinearIn((0, 2), True)),
    **_named("DepthwiseConv2dNativeBackpropFilter TridiagonalMatMul", LinearIn((0, 2), True)),
}
"""An op that stands here is linear in these operands, by itself; of others nothing is said."""

SHAPES = frozenset(
    [
        *("Shape", "ShapeN", "Size", "Rank", "BroadcastGradientArgs", "OnesLike", "ConcatOffset", "VariableShape"),
        *("TensorListLength", "TensorListElementShape", "NoOp", "ReadVariableOp"),
    ]
)
"""Ops whose outputs are the same whatever the values of their operands."""

ZEROS = frozenset(["ZerosLike", "EmptyTensorList", "TensorListReserve"])
"""Ops that give zeros alone, and lists of what is read as zeros until it is written."""


def linear_operands(op: str, count: int) -> tuple[Sequence[int], bool] | None:
    """The operands in which an op with `count` of them is linear, and whether in each apart; None: it is not said."""
    if op in ("DynamicStitch", "ParallelDynamicStitch"):  # as many indices as data stand before the data
        return range(count // 2, count), False
    rule = LINEAR.get(op)
    return None if rule is None else (rule.positions(count), rule.apart)
