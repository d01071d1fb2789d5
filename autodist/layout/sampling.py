"""Rules for candidate sampling, as in `nce_loss`: sampled classes, and tensors that append them to the true ones."""

from __future__ import annotations

from dataclasses import replace

from autodist.layout.facts import (
    REPLICATED,
    Fact,
    Form,
    Positions,
    Recovery,
    RowsWithTail,
    Sharded,
    UnknownFact,
    elements_of,
)
from autodist.layout.lengths import is_length_of, length
from autodist.layout.op_context import OpContext, Rule, op_names


def sample(ctx: OpContext) -> list[Fact]:
    """Candidate samplers: classes, and the expected counts of the true and of the sampled classes."""
    drawn: Fact = ctx.unknown("it samples classes, which each replica draws for itself", Recovery.ALWAYS)
    expected = _expected(ctx)
    return [drawn, drawn if isinstance(expected, Form) and expected.is_replicated else expected, drawn]


def sample_all(ctx: OpContext) -> list[Fact]:
    """AllCandidateSampler: every class in order."""
    return [REPLICATED, _expected(ctx), REPLICATED]


def sample_by_counts(ctx: OpContext) -> list[Fact]:
    """LearnedUnigramCandidateSampler: classes by their frequency in the replica's labels of earlier steps."""
    drawn, expected, _ = sample(ctx)
    if isinstance(expected, Form):
        expected = replace(expected, mixed_at=expected.mixed_at or ctx.node.name)
    return [drawn, expected, drawn]


def _expected(ctx: OpContext) -> Form | UnknownFact:
    true = ctx.form(0)
    if isinstance(true, Form) and true.factors:
        return ctx.unknown("its true classes are scaled by sums over the batch")
    return true if isinstance(true, Form) else UnknownFact(true.reason)


def accidental_hits(ctx: OpContext) -> list[Fact]:
    """ComputeAccidentalHits: for each sampled class that is a true one, the example's index, its position, a weight."""
    true, sampled = ctx.form(0), ctx.form(1)
    known = isinstance(true, Form) and true.rows is not None and true.rows.axis == 0 and not true.factors
    if not known or not is_same_or_noise(sampled):
        reason = true.reason if isinstance(true, UnknownFact) else "its true classes do not belong to examples"
        return [ctx.unknown(reason)] * 3
    assert isinstance(true, Form) and true.rows is not None
    hits = elements_of(ctx.named())
    each = Form(hits, mixed_at=true.mixed_at)
    return [ctx.unknown("its true classes are not in the order of the examples") if true.rows.order
            else Positions(true.rows, hits), each, each]  # fmt: skip


def is_same_or_noise(form: Form | UnknownFact) -> bool:
    return form.recovery is Recovery.ALWAYS if isinstance(form, UnknownFact) else form.is_replicated


def put_behind(ctx: OpContext, first: int, second: int, axis: int) -> RowsWithTail | None:
    """Concatenates rows of examples and rows of no example along the batch axis; None for anything else."""
    rows, rest = ctx.form(first), ctx.form(second)
    if not isinstance(rows, Form) or rows.rows is None or rows.factors or rows.rows.order or rows.rows.axis != axis:
        return None
    if axis != 0 or not is_same_or_noise(rest):
        return None
    return RowsWithTail(rows, rest, ctx.shape(first)[0])


def of_both(rule: Rule, ctx: OpContext, index: int) -> Fact:
    """Applies a rule to rows of examples and to the rows after them separately; rows must stay on their axis."""
    followed = ctx.facts[index]
    assert isinstance(followed, RowsWithTail)
    first, rest = (rule(_with(ctx, index, part)) for part in (followed.first, followed.rest))
    keeps = isinstance(first, Form) and first.rows is not None and replace(first.rows, per=None) == replace(
        followed.first.rows or Sharded(0), per=None
    )  # fmt: skip
    if keeps and isinstance(first, Form) and isinstance(rest, Form | UnknownFact) and is_same_or_noise(rest):
        return RowsWithTail(first, rest, followed.length)
    return ctx.unknown("it mixes rows of examples with the rows after them")


def _with(ctx: OpContext, index: int, fact: Fact) -> OpContext:
    return replace(ctx, facts=[*ctx.facts[:index], fact, *ctx.facts[index + 1 :]])


def one_part(ctx: OpContext) -> Fact:
    """Slice that selects exactly the rows of examples, or exactly the rows after them."""
    followed = ctx.facts[0]
    assert isinstance(followed, RowsWithTail)
    rank = ctx.rank(0)
    if rank is None:
        return ctx.unknown("the rank of its input is not known")
    begin, size = ([length(ctx, index, axis) for axis in range(rank)] for index in (1, 2))
    if begin[1:] == [0] * (rank - 1) and all(end == -1 for end in size[1:]):
        if begin[0] == 0 and _is_end(ctx, 2, followed):
            return followed.first
        if size[0] == -1 and _is_end(ctx, 1, followed):
            return followed.rest
    return ctx.unknown("its slice is neither the rows of examples nor the rows after them")


def _is_end(ctx: OpContext, index: int, followed: RowsWithTail) -> bool:
    """Returns True if the first element of an input is the end of the rows of examples."""
    assert followed.first.rows is not None
    if followed.length is not None and length(ctx, index) == followed.length:
        return True
    return is_length_of(ctx, index, followed.first.rows)


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        op_names("UniformCandidateSampler LogUniformCandidateSampler FixedUnigramCandidateSampler"), sample
    ),
    **dict.fromkeys(["LearnedUnigramCandidateSampler", "ThreadUnsafeUnigramCandidateSampler"], sample_by_counts),
    "AllCandidateSampler": sample_all,
    "ComputeAccidentalHits": accidental_hits,
}
