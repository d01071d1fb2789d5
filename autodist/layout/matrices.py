"""Rules for ops on the last axes of a tensor that treat leading axes as a batch: linear algebra, Fourier transforms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autodist.layout.arithmetic import factors_of, nonlinear
from autodist.layout.combine import has_rows, joined_rows, operands_of, same_rows
from autodist.layout.factors import times
from autodist.layout.facts import REPLICATED, Fact, Form, UnknownFact, form_of
from autodist.layout.movement import moving
from autodist.layout.op_context import OpContext, Rule, op_names


def of_last_axes(number: int, others: Sequence[int] = ()) -> Rule:
    """Returns a rule for functions of the last `number` axes of the first input and of `others`, with aligned axes."""

    def apply(ctx: OpContext) -> Fact:
        result = nonlinear(ctx, [0, *others])
        if not isinstance(result, Form) or result.rows is None:
            return result
        ranks = [ctx.rank(index) for index in (0, *others)]
        rank = max(value or 0 for value in ranks)
        if None in ranks or result.rows.axis >= rank - number:
            return ctx.unknown(
                f"the examples lie along one of its last {number} axes, or its input's rank is not known"
            )
        return result if _rest_is_same(ctx, (0, *others)) else ctx.unknown("its parameters differ between replicas")

    return apply


def linear_in_last_axes(number: int) -> Rule:
    """Returns a rule for linear functions of the last `number` axes of the first input, which keep sums and means."""

    def apply(ctx: OpContext) -> Fact:
        if not _rest_is_same(ctx, (0,)):
            return ctx.unknown("its parameters differ between replicas")
        return moving(lambda s, form, rows: _apart(s, form, rows.axis, number))(ctx)

    return apply


def _apart(ctx: OpContext, form: Form, axis: int, number: int) -> Fact:
    rank = ctx.rank(0)
    if rank is None or axis >= rank - number:
        return ctx.unknown(f"the examples lie along one of its last {number} axes, or its input's rank is not known")
    return form


def _rest_is_same(ctx: OpContext, indices: Sequence[int]) -> bool:
    return all(form_of(fact) == REPLICATED for index, fact in enumerate(ctx.facts) if index not in indices)


def solve(ctx: OpContext) -> Fact:
    """MatrixSolve, MatrixTriangularSolve: linear in the right-hand side, not in the matrix."""
    operands = operands_of(ctx)
    matrix, right = operands[:2]
    if not has_rows(operands):
        return nonlinear(ctx)
    rank = max(ctx.rank(0) or 0, ctx.rank(1) or 0)
    if matrix == REPLICATED and isinstance(right, Form) and right.rows and ctx.rank(1) == rank == right.rows.axis + 1:
        return right  # columns are independent
    if factors_of(matrix):
        return ctx.unknown("it is not linear in a matrix that is scaled by sums over the batch")
    result = joined_rows(ctx, operands[:2], (0, 1))
    if isinstance(result, UnknownFact) or result.rows is None:
        return result
    if result.rows.axis >= rank - 2:
        return ctx.unknown("the examples lie along a matrix's rows or columns")
    return replace(result, factors=factors_of(right))


def cross(ctx: OpContext) -> Fact:
    """Cross: bilinear, along the last axis."""
    operands = operands_of(ctx)
    if not has_rows(operands):
        return nonlinear(ctx)
    result = joined_rows(ctx, operands, (0, 1))
    if isinstance(result, UnknownFact) or result.rows is None or result.rows.axis == (ctx.rank(0) or 0) - 1:
        return (
            result if isinstance(result, UnknownFact) else ctx.unknown("the examples lie along the axis of its vectors")
        )
    return replace(result, factors=times(factors_of(operands[0]), factors_of(operands[1])))


def set_diagonal(ctx: OpContext) -> Fact:
    """MatrixSetDiagV3: matrix and diagonal have equal leading axes."""
    forms = ctx.forms(0, 1)
    if isinstance(forms, UnknownFact):
        return forms
    matrix, diagonal = forms
    if matrix.is_replicated and diagonal.is_replicated:
        return REPLICATED
    if matrix.rows is None or diagonal.rows is None or form_of(ctx.facts[2]) != REPLICATED:
        return ctx.unknown("its matrices and its diagonals do not both have the examples along the same axis")
    rank, inner = ctx.rank(0), ctx.rank(1)
    alike = same_rows(matrix.rows, diagonal.rows)
    if alike and matrix.factors == diagonal.factors and rank and inner and matrix.rows.axis < min(rank - 2, inner - 1):
        return replace(matrix, mixed_at=matrix.mixed_at or diagonal.mixed_at)
    return ctx.unknown("its matrices and its diagonals do not both have the examples along the same axis")


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        op_names(
            "MatrixDeterminant LogMatrixDeterminant MatrixInverse MatrixSquareRoot MatrixLogarithm MatrixExponential "
            "Cholesky SelfAdjointEigV2 Eig Svd Qr Lu"
        ),
        of_last_axes(2),
    ),
    **dict.fromkeys(
        op_names("FFT IFFT RFFT IRFFT MatrixDiag MatrixDiagV2 MatrixDiagV3 BatchFFT BatchIFFT"), linear_in_last_axes(1)
    ),
    **dict.fromkeys(
        op_names("FFT2D IFFT2D RFFT2D IRFFT2D MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3 MatrixBandPart"),
        linear_in_last_axes(2),
    ),
    **dict.fromkeys(["FFT3D", "IFFT3D", "RFFT3D", "IRFFT3D"], linear_in_last_axes(3)),
    **dict.fromkeys(["MatrixSolve", "MatrixTriangularSolve"], solve),
    **dict.fromkeys(["LowerBound", "UpperBound"], of_last_axes(1, (1,))),
    "TridiagonalMatMul": of_last_axes(2, (1, 2, 3)),
    "TridiagonalSolve": of_last_axes(2, (1,)),
    "MatrixSetDiagV3": set_diagonal,
    "Cross": cross,
}
