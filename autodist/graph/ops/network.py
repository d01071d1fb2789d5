"""Products of matrices, layers of networks, and what TensorFlow makes for the gradients of these and of arithmetic."""

from autodist.graph.ops.row import Row, Trait, linear, product

ROWS = (
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
    # Solutions, linear in what is divided.
    Row("MatrixTriangularSolve MatrixSolve BatchMatrixTriangularSolve BatchMatrixSolve", linear=linear(1)),
    Row("TridiagonalSolve", linear=linear(1)),
    # What is made for gradients: linear in the one that comes in.
    Row("ReluGrad Relu6Grad EluGrad SeluGrad LeakyReluGrad SoftplusGrad SoftsignGrad", linear=linear(0)),
    Row("BiasAddGrad FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3 LRNGrad", linear=linear(0)),
    Row("FakeQuantWithMinMaxArgsGradient FakeQuantWithMinMaxVarsGradient", linear=linear(0)),
    Row("FakeQuantWithMinMaxVarsPerChannelGradient QuantizeAndDequantizeV4Grad", linear=linear(0)),
    Row("TanhGrad SigmoidGrad SqrtGrad RsqrtGrad ReciprocalGrad InvGrad CholeskyGrad", linear=linear(1)),
    Row("AvgPoolGrad AvgPool3DGrad MaxPoolGradWithArgmax", linear=linear(1)),
    Row("MaxPoolGrad MaxPool3DGrad MaxPoolGradGrad MaxPool3DGradGrad MaxPoolGradGradWithArgmax", linear=linear(2)),
    Row("MaxPoolGradV2 MaxPoolGradGradV2 Dilation2DBackpropInput Dilation2DBackpropFilter", linear=linear(2)),
)
