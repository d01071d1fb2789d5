"""Arithmetic, element by element."""

from autodist.graph.ops.row import Row, Trait, linear, product

_EACH = Trait.ELEMENTWISE
_ZERO = _EACH | Trait.ZERO_TO_ZERO
_EXACT = _EACH | Trait.EXACT
_SELECTS = Trait.EXACT | Trait.LEVELS

ROWS = (
    Row("Add AddV2", _EXACT | Trait.ADDITION | Trait.LEVELS, linear()),
    Row("AddN Sub", _EXACT | Trait.LEVELS, linear()),
    Row("AccumulateNV2", linear=linear()),
    Row("Maximum Minimum", _EXACT | Trait.LEVELS),
    Row("SelectV2", _EACH | _SELECTS, linear(but=(0,))),
    Row("Select", _SELECTS, linear(but=(0,))),  # a vector chooses whole rows
    Row("Mul MulNoNan", _EXACT | Trait.PRODUCT, product(0, 1)),
    Row("RealDiv Div DivNoNan", _EXACT | Trait.QUOTIENT, linear(0)),
    Row("Xdivy", _EACH | Trait.QUOTIENT, linear(0)),
    Row("Xlogy Xlog1py", _EACH, linear(0)),
    Row("Identity", _ZERO | _EXACT | Trait.SAME | Trait.MEASURES, linear(0)),
    Row("StopGradient", _ZERO | Trait.SAME | Trait.MEASURES, linear(0)),
    Row("PreventGradient", _ZERO | Trait.SAME, linear(0)),
    Row("Snapshot", _EACH | Trait.SAME | Trait.MEASURES, linear(0)),
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
    Row("CheckNumerics", Trait.LOOKS | Trait.NOT_IN_XLA | Trait.MEASURES, linear(0)),
    Row("CheckNumericsV2", Trait.LOOKS, linear(0)),
)
