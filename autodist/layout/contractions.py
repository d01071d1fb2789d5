"""Rules for products that sum over shared axes: matrix products and einsum."""

from __future__ import annotations

from dataclasses import replace

from autodist.layout.combine import Operand, in_one_order, operands_of
from autodist.layout.factors import NONE, times
from autodist.layout.facts import REPLICATED, Base, Fact, Form, Recovery, Sharded, Statistic, UnknownFact, is_noise
from autodist.layout.op_context import OpContext, Rule

Labels = list[object]
_Labelled = tuple[Sharded | None, Labels]


def matmul(ctx: OpContext) -> Fact:
    left: Labels = ["k", "m"] if ctx.flag("transpose_a") else ["m", "k"]
    right: Labels = ["n", "k"] if ctx.flag("transpose_b") else ["k", "n"]
    return contract(ctx, left, right, ["m", "n"])


def batch_matmul(ctx: OpContext) -> Fact:
    """BatchMatMulV2: leading axes are broadcast, aligned from the right."""
    first, second = ctx.rank(0), ctx.rank(1)
    if first is None or second is None:
        return _opaque_or(ctx, "the ranks of its inputs are not known")
    left: Labels = [*range(first - 2, 0, -1), *("km" if ctx.flag("adj_x") else "mk")]
    right: Labels = [*range(second - 2, 0, -1), *("nk" if ctx.flag("adj_y") else "kn")]
    return contract(ctx, left, right, [*range(max(first, second) - 2, 0, -1), "m", "n"])


def einsum(ctx: OpContext) -> Fact:
    """Einsum with one or two inputs, with or without an ellipsis."""
    inputs, _, output = ctx.text("equation").replace(" ", "").partition("->")
    terms = inputs.split(",")
    labels = [_expand(term, ctx.rank(index)) for index, term in enumerate(terms)]
    if None in labels or len(labels) > 2:
        return _opaque_or(ctx, "the ranks of its inputs are not known")
    known = [entry for entry in labels if entry is not None]
    widest = max((sum(isinstance(label, int) for label in entry) for entry in known), default=0)
    result = _expand(output, widest + len(output.replace("...", "")))
    if result is None:
        return _opaque_or(ctx, "its equation is not supported")
    return contract(ctx, known[0], known[1] if len(known) == 2 else [], result)


def _expand(term: str, rank: int | None) -> Labels | None:
    """Returns one label per axis; axes of an ellipsis are numbered from the right."""
    before, dots, after = term.partition("...")
    if not dots:
        return [*term]
    if rank is None:
        return None
    return [*before, *range(rank - len(before) - len(after), 0, -1), *after]


def contract(ctx: OpContext, left: Labels, right: Labels, result: Labels) -> Fact:
    """Returns the layout of a product of two labelled tensors, summed over the labels missing in the result."""
    operands = _noise_as_replicated(operands_of(ctx))
    unknown = next((operand for operand in operands if isinstance(operand, UnknownFact)), None)
    if unknown is not None:
        others_same = all(isinstance(o, UnknownFact) or (isinstance(o, Form) and o.is_replicated) for o in operands)
        return unknown if others_same and unknown.recovery is not Recovery.NEVER else UnknownFact(unknown.reason)
    forms = [operand for operand in operands if isinstance(operand, Form)]
    if len(forms) < len(operands) or sum(form.base is Base.PARTIAL_SUM for form in forms) > 1:
        return _with_statistics(ctx, operands)
    factors = NONE
    for form in forms:
        factors = times(factors, form.factors)
    mixed_at = next((form.mixed_at for form in forms if form.mixed_at), None)
    labelled = [(form.rows, labels) for form, labels in zip(forms, (left, right), strict=False)]
    labelled, paired_at = _in_one_order(labelled)
    mixed_at = mixed_at or paired_at
    batch = _batch_label(labelled)
    if batch is None:
        if all(form.rows is None for form in forms):
            base = Base.PARTIAL_SUM if any(form.base is Base.PARTIAL_SUM for form in forms) else Base.REPLICATED
            return Form(base, factors, mixed_at)
        return ctx.unknown("it combines each example with every other, or with a tensor by position in the batch")
    if any(form.base is Base.PARTIAL_SUM for form in forms):
        return ctx.unknown("it multiplies rows of examples by a sum over the batch")
    rows, label = batch
    if label in result:
        return Form(Sharded(result.index(label), rows.count, rows.per, rows.order), factors, mixed_at)
    form = Form(Base.PARTIAL_SUM, factors, mixed_at)
    return ctx.additive(form) if not result else form


def _noise_as_replicated(operands: list[Operand]) -> list[Operand]:
    """Treats noise as replicated when it is combined with rows: it has no examples."""
    if not any(isinstance(operand, Form) and operand.rows for operand in operands):
        return operands
    return [REPLICATED if is_noise(operand) else operand for operand in operands]


def _in_one_order(labelled: list[_Labelled]) -> tuple[list[_Labelled], str | None]:
    """Returns both operands' rows in their common order, and the node that paired different examples, if any."""
    both = [rows for rows, _ in labelled if rows is not None]
    if len(both) < 2:
        return labelled, None
    paired = in_one_order(both[0], replace(both[1], axis=both[0].axis))
    if paired is None or paired[1] is None:
        return labelled, None
    order = paired[0].order
    return [(rows and replace(rows, order=order), labels) for rows, labels in labelled], paired[1]


def _batch_label(labelled: list[_Labelled]) -> tuple[Sharded, object] | None:
    """Returns the single label of the batch axis; None if operands disagree on it or an operand without rows has it."""
    sharded = [(rows, labels[rows.axis]) for rows, labels in labelled if rows is not None]
    if not sharded or len({label for _, label in sharded}) != 1:
        return None
    rows, label = sharded[0]
    if any((other.count, other.order) != (rows.count, rows.order) for other, _ in sharded):
        return None
    if any(label in labels for base, labels in labelled if base is None):
        return None
    if any(labels.count(label) > 1 for _, labels in labelled):
        return None
    return rows, label


def _with_statistics(ctx: OpContext, operands: list[Operand]) -> Fact:
    if any(isinstance(operand, Form) and operand.rows for operand in operands):
        return ctx.unknown("it multiplies rows of examples by statistics of the batch")
    return Statistic(ctx.unknown("it is a function of means over the batch that is not itself a mean").reason)


def _opaque_or(ctx: OpContext, why: str) -> UnknownFact:
    unknown = next((operand for operand in operands_of(ctx) if isinstance(operand, UnknownFact)), None)
    return UnknownFact(unknown.reason) if unknown else ctx.unknown(why)


RULES: dict[str, Rule] = {
    "MatMul": matmul,
    **dict.fromkeys(["BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"], batch_matmul),
    "Einsum": einsum,
}
