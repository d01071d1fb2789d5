"""The op table and its queries."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autodist.graph.ops.row import SECOND_HALF, Row, Trait, linear, product

_EACH = Trait.ELEMENTWISE
_ZERO = _EACH | Trait.ZERO_TO_ZERO
_EXACT = _EACH | Trait.EXACT
_SELECTS = Trait.EXACT | Trait.LEVELS

ROWS = (
    # -- elementwise arithmetic --
    Row("Add AddV2", _EXACT | Trait.ADDITION | Trait.LEVELS, linear()),
    Row("AddN Sub", _EXACT | Trait.LEVELS, linear()),
    Row("AccumulateNV2", linear=linear()),
    Row("Maximum Minimum", _EXACT | Trait.LEVELS),
    Row("SelectV2", _EACH | _SELECTS, linear(but=(0,))),
    Row("Select", _SELECTS, linear(but=(0,))),  # a vector selects complete rows
    Row("Mul MulNoNan", _EXACT | Trait.PRODUCT, product(0, 1)),
    Row("RealDiv Div DivNoNan", _EXACT | Trait.QUOTIENT, linear(0)),
    Row("Xdivy", _EACH | Trait.QUOTIENT, linear(0)),
    Row("Xlogy Xlog1py", _EACH, linear(0)),
    Row("Identity", _ZERO | _EXACT | Trait.IDENTITY | Trait.MEASURES, linear(0)),
    Row("StopGradient", _ZERO | Trait.IDENTITY | Trait.MEASURES, linear(0)),
    Row("PreventGradient", _ZERO | Trait.IDENTITY, linear(0)),
    Row("Snapshot", _EACH | Trait.IDENTITY | Trait.MEASURES, linear(0)),
    Row("RefIdentity DebugIdentityV2 DebugIdentityV3 DeepCopy", linear=linear(0)),
    Row("Cast", _ZERO | Trait.CASTS | Trait.MEASURES),
    Row("Neg", _ZERO | _EXACT | Trait.MEASURES, linear(0)),
    Row("Abs", _ZERO | _EXACT | Trait.MEASURES),
    Row("Sign Sqrt Square", _ZERO | _EXACT),
    Row("Asin Asinh Atan Atanh Ceil Elu Erf Expm1 Floor LeakyRelu Log1p Relu Relu6 Rint Round Selu Sin Sinh", _ZERO),
    Row("Softsign Tan Tanh", _ZERO),
    Row("Inv Reciprocal SquaredDifference", _EXACT),
    Row("Equal NotEqual", _EACH | Trait.COMPARISON),
    Row("Greater GreaterEqual Less LessEqual", _EXACT | Trait.COMPARISON),
    Row("LogicalAnd LogicalNot LogicalOr", _EXACT | Trait.LOGIC),
    Row("Conj Imag Real", _EACH, linear(0)),
    Row("Complex", _EACH, linear(0, 1)),
    Row("Acos Acosh Atan2 Cos Cosh Digamma Erfc Erfinv Exp Lgamma Log Ndtri Pow Rsqrt Sigmoid Softplus", _EACH),
    Row("BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e", _EACH),
    Row("BesselY0 BesselY1 Betainc Dawsn Expint FresnelCos FresnelSin Igamma Igammac Polygamma Spence Zeta", _EACH),
    Row("FloorDiv TruncateDiv", _EACH | Trait.WHOLE_QUOTIENT),
    Row("FloorMod Mod NextAfter TruncateMod", _EACH),
    Row("BitwiseAnd BitwiseOr BitwiseXor Invert LeftShift RightShift", _EACH),
    Row("Angle ApproximateEqual Bucketize ClipByValue ComplexAbs IsFinite IsInf IsNan", _EACH),
    Row("FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars", _EACH),
    Row("AsString StaticRegexFullMatch StaticRegexReplace StringLength StringLower StringStrip", _EACH),
    Row("StringToHashBucketFast StringToHashBucketStrong StringToNumber StringUpper", _EACH),
    Row("OnesLike", _EACH | Trait.BY_SHAPES, filling=1),
    Row("ZerosLike", _EACH | Trait.ZEROS, filling=0),
    Row("CheckNumerics", Trait.CHECKS | Trait.NOT_IN_XLA | Trait.MEASURES, linear(0)),
    Row("CheckNumericsV2", Trait.CHECKS, linear(0)),
    # -- layout: moves, selections, reductions, shapes, lists --
    Row("Reshape ExpandDims Squeeze EnsureShape", Trait.RESHAPES | Trait.MEASURES, linear(0)),
    Row("BroadcastTo", Trait.REPEATS | Trait.MEASURES, linear(0)),
    Row("Tile", Trait.REPEATS, linear(0)),
    Row("Transpose", Trait.MEASURES, linear(0)),
    Row("ConjugateTranspose ReverseV2 Reverse ReverseSequence Roll Cumsum", linear=linear(0)),
    Row("Slice StridedSlice", Trait.SLICES | Trait.PICKS, linear(0)),
    Row("SplitV GatherV2 Gather GatherNd", Trait.PICKS, linear(0)),
    Row("Unpack", linear=linear(0)),
    Row("Split ScatterNd", linear=linear(1)),
    Row("StridedSliceGrad", linear=linear(4)),
    Row("Pad MirrorPad MirrorPadGrad TileGrad DataFormatVecPermute", linear=linear(0)),
    Row("PadV2 TensorScatterAdd TensorScatterSub TensorScatterUpdate", linear=linear(0, 2)),
    Row("Pack ParallelConcat", linear=linear()),
    Row("ConcatV2", linear=linear(but=(-1,))),
    Row("Concat", linear=linear(but=(0,))),
    Row("BatchToSpace BatchToSpaceND SpaceToBatch SpaceToBatchND SpaceToDepth DepthToSpace", linear=linear(0)),
    Row("Diag DiagPart MatrixBandPart MatrixDiag MatrixDiagPart MatrixDiagV2 MatrixDiagPartV2", linear=linear(0)),
    Row("MatrixDiagV3 MatrixDiagPartV3", linear=linear(0)),
    Row("MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3", linear=linear(0, 1)),
    Row("BroadcastArgs Empty", Trait.OF_SHAPES),
    Row("DynamicStitch ParallelDynamicStitch", Trait.OF_SHAPES, linear=SECOND_HALF),
    Row("SparseToDense", linear=linear(2, 3)),
    # Reductions.
    Row("Sum", linear=linear(0)),
    Row("SparseReduceSum", linear=linear(1)),
    Row("Mean", Trait.MEASURES, linear(0)),
    Row("Max Min", Trait.MEASURES | Trait.EXTREME),
    Row("SegmentSum SegmentSumV2 SegmentMean UnsortedSegmentSum", linear=linear(0)),
    Row("SparseSegmentSum SparseSegmentMean SparseSegmentSqrtN", linear=linear(0)),
    Row("SparseSegmentSumWithNumSegments SparseSegmentMeanWithNumSegments", linear=linear(0)),
    Row("SparseSegmentSqrtNWithNumSegments SparseSegmentSumGrad SparseSegmentMeanGrad", linear=linear(0)),
    Row("SparseSegmentSqrtNGrad", linear=linear(0)),
    Row("SparseSegmentSumGradV2 SparseSegmentMeanGradV2 SparseSegmentSqrtNGradV2", Trait.SEGMENT_ROWS, linear(0)),
    # Shapes; and results whose length depends on data.
    Row("Shape ShapeN Size", Trait.LENGTHS | Trait.BY_SHAPES | Trait.OF_SHAPES),
    Row("Rank BroadcastGradientArgs ConcatOffset", Trait.BY_SHAPES | Trait.OF_SHAPES),
    Row("Unique UniqueV2", Trait.UNIQUE | Trait.NOT_IN_XLA),
    Row("UniqueWithCounts UniqueWithCountsV2", Trait.UNIQUE_COUNTED),
    Row("ListDiff NonMaxSuppressionV3 NonMaxSuppressionV4 Where", Trait.NOT_IN_XLA),
    Row("DynamicPartition", Trait.NOT_IN_XLA, linear(0)),
    # Lists of tensors.
    Row("EmptyTensorList TensorListReserve", Trait.LIST | Trait.ZEROS),
    Row("TensorListLength", Trait.LIST | Trait.BY_SHAPES),
    Row("TensorListElementShape", Trait.BY_SHAPES),
    Row("TensorListStack TensorListGetItem TensorListFromTensor", Trait.LIST, linear(0)),
    Row("TensorListSetItem", Trait.LIST, linear(0, 2)),
    Row("TensorListPushBack", Trait.LIST, linear(0, 1)),
    Row("TensorListPopBack TensorListGather TensorListConcat TensorListConcatV2 TensorListResize", linear=linear(0)),
    Row("TensorListSplit TensorListScatter TensorListScatterV2", linear=linear(0)),
    Row("TensorListConcatLists TensorListScatterIntoExistingList TensorListPushBackBatch", linear=linear(0, 1)),
    # -- matrix products, network layers, and their gradients --
    Row("MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 SparseMatMul Cross Conv", linear=product(0, 1)),
    Row("Einsum", linear=product()),
    Row("SparseTensorDenseMatMul", linear=product(1, 3)),
    Row("TridiagonalMatMul", linear=product(0, 2)),
    Row("Conv2D Conv3D DepthwiseConv2dNative", Trait.CONVOLUTION, product(0, 1)),
    Row(
        "Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput",
        Trait.CONVOLUTION,
        product(1, 2),
    ),
    Row(
        "Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter",
        Trait.CONVOLUTION,
        product(0, 2),
    ),
    Row("Conv2DBackpropInputV2 Conv2DBackpropFilterV2 Conv3DBackpropInput Conv3DBackpropFilter", Trait.CONVOLUTION),
    Row("FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3", Trait.NORMALISES),
    Row("BiasAdd BiasAddV1", linear=linear(0, 1)),
    Row("AvgPool AvgPool3D ExtractImagePatches ExtractVolumePatches", linear=linear(0)),
    Row("ResizeBilinear ResizeNearestNeighbor ResizeBicubic ResizeArea ScaleAndTranslate", linear=linear(0)),
    Row("CropAndResize CropAndResizeGradImage ScaleAndTranslateGrad", linear=linear(0)),
    Row("ResizeBilinearGrad ResizeNearestNeighborGrad ResizeBicubicGrad", linear=linear(0)),
    Row("FFT FFT2D FFT3D FFTND IFFT IFFT2D IFFT3D IFFTND", linear=linear(0)),
    Row("RFFT RFFT2D RFFT3D RFFTND IRFFT IRFFT2D IRFFT3D IRFFTND", linear=linear(0)),
    # Solvers, linear in the right-hand side.
    Row("MatrixTriangularSolve MatrixSolve BatchMatrixTriangularSolve BatchMatrixSolve", linear=linear(1)),
    Row("TridiagonalSolve", linear=linear(1)),
    # Gradient ops, linear in the incoming gradient.
    Row("ReluGrad Relu6Grad EluGrad SeluGrad LeakyReluGrad SoftplusGrad SoftsignGrad", linear=linear(0)),
    Row("BiasAddGrad FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3 LRNGrad", linear=linear(0)),
    Row("FakeQuantWithMinMaxArgsGradient FakeQuantWithMinMaxVarsGradient", linear=linear(0)),
    Row("FakeQuantWithMinMaxVarsPerChannelGradient QuantizeAndDequantizeV4Grad", linear=linear(0)),
    Row("TanhGrad SigmoidGrad SqrtGrad RsqrtGrad ReciprocalGrad InvGrad CholeskyGrad", linear=linear(1)),
    Row("AvgPoolGrad AvgPool3DGrad MaxPoolGradWithArgmax", linear=linear(1)),
    Row("MaxPoolGrad MaxPool3DGrad MaxPoolGradGrad MaxPool3DGradGrad MaxPoolGradGradWithArgmax", linear=linear(2)),
    Row("MaxPoolGradV2 MaxPoolGradGradV2 Dilation2DBackpropInput Dilation2DBackpropFilter", linear=linear(2)),
    # -- state, data, communication, control flow --
    Row("Const", Trait.SOURCE | Trait.EXACT),
    Row("Placeholder PlaceholderV2", Trait.SOURCE | Trait.FED),
    # AutoDist feeds it in a run; XLA would drop it.
    Row("PlaceholderWithDefault", Trait.FED | Trait.NOT_IN_XLA, linear(0)),
    Row("NoOp", Trait.BY_SHAPES),
    Row("Assert", Trait.PRINTS | Trait.NOT_IN_XLA),
    Row("PrintV2", Trait.PRINTS),
    Row("Print", Trait.CHECKS),
    # Variables. For row accesses, a compiled function would take and return the complete variable.
    Row("VarHandleOp", Trait.SOURCE),
    Row("ReadVariableOp", Trait.READ | Trait.BY_SHAPES),
    Row("ResourceGather", Trait.READ | Trait.NOT_IN_XLA),
    Row("ResourceGatherNd _ReadVariablesOp", Trait.READ),
    Row("AssignVariableOp AssignAddVariableOp AssignSubVariableOp", Trait.ASSIGNMENT),
    Row("ResourceStridedSliceAssign", Trait.NOT_IN_XLA),
    Row("VariableShape", Trait.QUERY | Trait.BY_SHAPES),
    Row("VarIsInitializedOp", Trait.QUERY | Trait.NOT_IN_XLA),
    Row("VariableV2 Variable TemporaryVariable", Trait.REFERENCE),
    # Tables and data.
    Row("HashTableV2 MutableHashTableV2", Trait.TABLE | Trait.OF_SCALARS),
    Row("MutableHashTableOfTensorsV2 MutableDenseHashTableV2", Trait.TABLE),
    Row("LookupTableFindV2 LookupTableSizeV2", Trait.TABLE_READ),
    Row("LookupTableInsertV2 LookupTableRemoveV2 LookupTableImportV2 InitializeTableV2", Trait.TABLE_WRITE),
    Row("InitializeTableFromTextFileV2 InitializeTableFromDataset", Trait.TABLE_WRITE),
    Row("Iterator IteratorV2 OneShotIterator", Trait.ITERATOR),
    Row("IteratorGetNext IteratorGetNextSync", Trait.ITERATOR_GET),
    Row("IteratorGetNextAsOptional QueueDequeue QueueDequeueV2 QueueDequeueMany", Trait.QUEUE_GET),
    Row("QueueDequeueManyV2 QueueDequeueUpTo QueueDequeueUpToV2", Trait.QUEUE_GET),
    # Random numbers.
    Row("RandomUniform RandomUniformInt RandomStandardNormal TruncatedNormal", Trait.SEEDED),
    Row("ParameterizedTruncatedNormal Multinomial RandomGamma RandomPoisson RandomPoissonV2", Trait.SEEDED),
    Row("RandomShuffle", Trait.SEEDED | Trait.SHUFFLES),
    Row("RandomShuffleQueue UniformCandidateSampler LogUniformCandidateSampler", Trait.SEEDED),
    Row("LearnedUnigramCandidateSampler AllCandidateSampler FixedUnigramCandidateSampler", Trait.SEEDED),
    Row("ThreadUnsafeUnigramCandidateSampler", Trait.SEEDED),
    Row("RngReadAndSkip RngSkip StatefulStandardNormalV2 StatefulTruncatedNormal", Trait.GENERATOR),
    Row("StatefulUniform StatefulUniformFullInt StatefulUniformInt", Trait.GENERATOR),
    Row("StatelessRandomUniform StatelessRandomUniformInt StatelessRandomUniformFullInt", Trait.BY_KEY),
    Row("StatelessRandomUniformV2 StatelessRandomUniformIntV2 StatelessRandomUniformFullIntV2", Trait.BY_KEY),
    Row("StatelessRandomNormal StatelessRandomNormalV2 StatelessTruncatedNormal", Trait.BY_KEY),
    Row("StatelessTruncatedNormalV2 StatelessParameterizedTruncatedNormal StatelessMultinomial", Trait.BY_KEY),
    Row("StatelessRandomGammaV2 StatelessRandomGammaV3 StatelessRandomPoisson", Trait.BY_KEY),
    Row("StatelessRandomBinomial", Trait.BY_KEY),
    Row("StatelessShuffle", Trait.BY_KEY | Trait.SHUFFLES),
    Row("StatelessRandomGetKeyCounter StatelessRandomGetKeyCounterAlg StatelessRandomGetAlg", Trait.KEY),
    # Other workers.
    Row("CollectiveAssignGroupV2 CollectiveReduceV2 XlaAllReduce XlaRecv XlaReduceScatter XlaSend", Trait.NOT_IN_XLA),
    # Functions; TensorFlow 1 branches and loops.
    Row("PartitionedCall", Trait.CALL),
    Row("StatefulPartitionedCall", Trait.CALL | Trait.NOT_IN_XLA),
    Row("SymbolicGradient", Trait.NOT_IN_XLA),
    Row("If StatelessIf Case StatelessCase", Trait.BRANCH),
    Row("While StatelessWhile", Trait.LOOP),
    Row("Enter RefEnter", Trait.ENTER, linear(0)),
    Row("Switch RefSwitch", Trait.SWITCH, linear(0)),
    Row("Merge RefMerge", Trait.MERGE, linear()),
    Row("NextIteration RefNextIteration", Trait.BACK, linear(0)),
    Row("Exit RefExit", Trait.EXIT, linear(0)),
    Row("StackV2 Stack TensorArrayV3", Trait.STACK),
)

TABLE: Mapping[str, Row] = {name: row for row in ROWS for name in row.names.split()}
"""Maps an op to its row."""

_BITS = {name: row.traits.value for name, row in TABLE.items()}  # flag operations are slow: 20 000 queries


@functools.cache
def having(traits: Trait) -> frozenset[str]:
    """Returns the ops that have at least one of these traits."""
    wanted = traits.value
    return frozenset(name for name, bits in _BITS.items() if bits & wanted)


def linear_operands(op: str, count: int) -> tuple[Sequence[int], bool] | None:
    """Returns (operands in which an op is linear, True if in each separately); None: unspecified.

    Args:
        op: the op.
        count: the number of its operands.
    """
    rule = TABLE[op].linear if op in TABLE else None
    return None if rule is None else (rule.positions(count), rule.apart)


def filling(op: str) -> int | None:
    """Returns the number that all elements of the op's output equal; None if they are not constant."""
    return TABLE[op].filling if op in TABLE else None


def writes_rows(op: str) -> bool:
    """Returns True if an op writes rows of a variable, selected by its second input, and keeps the rest."""
    return op.startswith(("ResourceScatter", "ResourceSparseApply"))


def draws_numbers(op: str) -> bool:
    """Returns True if an op generates random numbers, which differ between replicas even for equal inputs."""
    return (
        "Random" in op
        or op.startswith(("StatelessTruncated", "StatelessParameterized", "StatelessShuffle"))
        or (op.endswith("Multinomial") or "SampleDistorted" in op)
    )


@dataclass(frozen=True)
class InPlaceSum:
    """Ops that add something to a variable or subtract it.

    Attributes:
        assign: the op for a complete variable.
        arithmetic: the corresponding op on tensors.
        scatter: the op for rows, by their indices.
        scatter_nd: the op for rows, by their positions, one after another in order.
    """

    assign: str
    arithmetic: str
    scatter: str
    scatter_nd: str


SUM = InPlaceSum("AssignAddVariableOp", "AddV2", "ResourceScatterAdd", "ResourceScatterNdAdd")
DIFFERENCE = InPlaceSum("AssignSubVariableOp", "Sub", "ResourceScatterSub", "ResourceScatterNdSub")
SUMS = (SUM, DIFFERENCE)
