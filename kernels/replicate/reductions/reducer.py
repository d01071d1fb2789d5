"""Reducer: reduces values over a worker's replicas, and records the reductions that are left over the workers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist.errors import RewriteError
from autodist.graph.editor import GraphEditor
from autodist.graph.names import node_of
from autodist.graph.parts import EvenSharesRequired, PendingReduction, PendingReductionKind, ReduceOp
from autodist.graph.stages import Stages
from autodist.graph.step import UNEVEN, PlacedStep
from autodist.graph.subgraph import SubgraphBuilder, Template, subgraph
from autodist.kernels.context import Context
from autodist.kernels.replicate.weights import ReplicaWeights
from autodist.kernels.sums import identity_like, ordered_sum, reduce_values
from autodist.layout import (
    Examples,
    Joined,
    Kind,
    Mean,
    PerExample,
    Propagation,
    Reduced,
    ReducedBy,
    Unknown,
    Weight,
)

EVEN_PARTS = "even_parts"
"""Name of the reduction that checks if all replicas have equal parts: sums of example counts and of their squares."""


SOME_EXAMPLES = "some_examples"
"""Name of the reduction that determines if any worker has examples."""


def _takes_along(pending: PendingReduction) -> bool:
    """Returns True if a count can share the bucket of a reduction: same dtype, and it represents counts exactly."""
    is_plain = (
        pending.kind is PendingReductionKind.STATE
        and pending.merge is ReduceOp.ADD
        and not pending.depth
        and not pending.is_sparse
    )
    return is_plain and pending.dtype in (tf.float32, tf.float64)


_MERGES = {ReducedBy.MAX: ReduceOp.MAX, ReducedBy.MIN: ReduceOp.MIN, ReducedBy.PRODUCT: ReduceOp.PRODUCT}


@dataclass(frozen=True)
class _Whole:
    """A tensor that a synchronizer later replaces by the reduced value, and the result computed from it."""

    reduced: tf.Tensor
    result: tf.Tensor


@dataclass(frozen=True)
class LocalPart:
    """A worker's part of a reduction.

    Attributes:
        local: of its replicas.
        total: the sum of their weights, for a weighted mean; None: no division.
        merge: the reduction op.
        is_squared: True if the result is the square root of the reduced value.
    """

    local: tf.Tensor
    total: tf.Tensor | None = None
    merge: ReduceOp = ReduceOp.ADD
    is_squared: bool = False

    def finished(self) -> _Whole:
        reduced = tf.identity(self.local) if self.total is None else tf.math.divide_no_nan(self.local, self.total)
        return _Whole(reduced, tf.sqrt(reduced) if self.is_squared else reduced)


class Reducer:
    """Reduces tensors of one replicated graph.

    Attributes:
        group: the places over which values are reduced.
        reductions: pending reductions over the workers; empty if there is one worker.
        checks: nodes that raise an error in a step whose parts cannot be combined.
        even_parts: the reason why all replicas need equally many examples; None if they do not.
    """

    def __init__(
        self,
        editor: GraphEditor,
        step: PlacedStep,
        context: Context,
        stages: Stages,
        flows: Propagation,
        parts: ReplicaWeights,
        replica_dependent: frozenset[str],
    ) -> None:
        self.editor, self.step, self.context, self.group = editor, step, context, context.group
        self.stages, self.flows, self.parts, self.replica_dependent = stages, flows, parts, replica_dependent
        self.count = len(context.copied_replicas)
        self.reductions: list[PendingReduction] = []
        self.checks: list[str] = []
        self.even_parts: EvenSharesRequired | None = None
        self._templates: dict[Hashable, Template] = {}
        self._weights: dict[tuple[Weight, tf.DType], tuple[list[str], str]] = {}

    def template(
        self, key: Hashable, dtypes: Sequence[tf.DType], build: Callable[..., Sequence[tf.Tensor]]
    ) -> Template:
        """Returns the template of arithmetic that many variables share; built once per kind."""
        if key not in self._templates:
            self._templates[key] = Template(dtypes, build)
        return self._templates[key]

    def require_known(self, name: str, kind: Kind) -> None:
        """Checks that the reduction of a tensor is known, in a step that must be exact (`is_whole`).

        Raises:
            RewriteError: it is not known, or examples only see those of their own replica.
        """
        if not self.step.is_whole:
            return
        if isinstance(kind, Joined | PerExample):
            if kind.mixed_at is not None:
                raise RewriteError(
                    f"examples see one another in the computation of {name} (first at {kind.mixed_at!r})"
                )
        elif isinstance(kind, Unknown):
            raise RewriteError(f"it is not known how {name} depends on the batch ({kind.reason})")

    def late_readers(self, name: str) -> list[str]:
        """Returns the run-once nodes that read a captured tensor."""
        return sorted(c for c in self.editor.consumers(node_of(name)) if c in self.stages.once)

    def note(self, pending: PendingReduction) -> None:
        """Records a pending reduction over the workers."""
        if self.group.spans_workers:
            self.reductions.append(pending)

    def reduce_value(
        self,
        name: str,
        captured: str,
        kind: Joined,
        copies: Sequence[str] | None = None,
        depth: int = 0,
        purpose: PendingReductionKind = PendingReductionKind.STATE,
    ) -> str:
        """Reduces a tensor over all replicas according to its kind; returns the tensor with the result.

        Args:
            name: of the reduction.
            captured: the tensor.
            kind: determines the reduction.
            copies: the tensor that replaces `captured` in each local replica; None: the replica's own copy.
            depth: number of reductions that this one depends on, in a chain.
            purpose: what the reduction is for.

        Raises:
            RewriteError: it is reduced over several workers, and its shape is not known.
        """
        self._require_sized(captured)
        with subgraph(self.editor, name) as f:
            made = self._locally(f, captured, kind, copies)
            whole = made.finished()
        self.noted(f, name, purpose, made, whole.reduced, self.level(captured), depth)
        return f.name(whole.result)

    def _require_sized(self, name: str) -> None:
        """Checks that a tensor can be reduced over all workers, which send it as a part of one vector.

        Raises:
            RewriteError: its shape is not known.
        """
        shape = self.step.spec_of(name).shape
        if self.group.spans_workers and not shape.is_fully_defined():
            raise RewriteError(
                f"{name!r} has the shape {shape}, but the step uses its sum or mean over the batch, which is reduced "
                "over all workers; its shape must be known before the step runs. Set it by tf.ensure_shape, or specify "
                "the length of arguments that are not split in input_signature."
            )

    def reduce_locally(self, name: str, captured: str, kind: Joined, copies: Sequence[str] | None = None) -> str:
        """Reduces a tensor over the local replicas only; arguments as of `reduce_value`."""
        if self.count == 1 and copies is None:
            return captured
        with subgraph(self.editor, name) as f:
            made = self._locally(f, captured, kind, copies)
            whole = made.finished()
        return f.name(whole.result)

    def _locally(self, f: SubgraphBuilder, captured: str, kind: Joined, copies: Sequence[str] | None) -> LocalPart:
        if copies is None:
            self.require_known(captured, kind)
        spec = self.step.spec_of(captured)
        names = copies or [self.parts.named(captured, k) for k in range(self.count)]
        values = [f.input(name, spec.dtype, spec.shape) for name in names]
        if not isinstance(kind, Reduced):
            return LocalPart(*self.weighted_sum(f, values, kind.weight if isinstance(kind, Mean) else None))
        if kind.by is ReducedBy.NORM:
            squares = [self.kept(f, tf.square(v), k) for k, v in enumerate(values)]
            return LocalPart(ordered_sum(squares), is_squared=True)
        merge = _MERGES[kind.by]
        return LocalPart(reduce_values([self.kept(f, v, k, merge) for k, v in enumerate(values)], merge), merge=merge)

    def weighted_sum(
        self, f: SubgraphBuilder, values: Sequence[tf.Tensor], weight: Weight | None
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Returns Σ w·v over the local replicas that have examples, and Σ w."""
        if weight is None:
            return ordered_sum([self.kept(f, v, k) for k, v in enumerate(values)]), None
        return self._weighed(f, values, weight)

    def _weighed(self, f: SubgraphBuilder, values: Sequence[tf.Tensor], weight: Weight) -> tuple[tf.Tensor, tf.Tensor]:
        dtype = values[0].dtype
        names, total = self.weights_of(weight, dtype)
        weights = [f.input(name, dtype, []) for name in names]
        terms = [tf.math.multiply_no_nan(v, w) for v, w in zip(values, weights, strict=True)]
        return ordered_sum(terms), f.input(total, dtype, [])

    def weights_of(self, weight: Weight, dtype: tf.DType) -> tuple[list[str], str]:
        """Returns the weight of each local replica and their sum. They are cached: equal weights can share a bucket."""
        key = (weight, dtype)
        if key not in self._weights:
            with subgraph(self.editor, f"weight/{len(self._weights)}") as f:
                weights = [self.parts.weight(f, weight, k, dtype) for k in range(self.count)]
                total = ordered_sum(weights)
            self._weights[key] = ([f.name(w) for w in weights], f.name(total))
        return self._weights[key]

    def level(self, name: str) -> int:
        """Returns the update round in which a captured tensor is computed."""
        return self.stages.level_of(node_of(name))

    def kept(self, f: SubgraphBuilder, value: tf.Tensor, k: int, merge: ReduceOp = ReduceOp.ADD) -> tf.Tensor:
        """Returns a local replica's value, or the identity element of the reduction if it has no examples."""
        if not self.parts.sizes:
            return value
        return tf.where(self.parts.is_used(f, k), value, identity_like(value, merge))

    def noted(
        self,
        f: SubgraphBuilder,
        name: str,
        kind: PendingReductionKind,
        part: LocalPart,
        result: tf.Tensor,
        level: int = 1,
        depth: int = 0,
    ) -> str:
        """Records a reduction of tensors built in a subgraph; returns the tensor with the result."""
        self.note(
            PendingReduction(
                name=name, kind=kind, local=(f.name(part.local),), result=(f.name(result),),
                weight=None if part.total is None else f.name(part.total), level=level,
                dtype=part.local.dtype, shape=part.local.shape, group=self.group,
                weight_dtype=None if part.total is None else part.total.dtype, merge=part.merge, depth=depth,
            )
        )  # fmt: skip
        return f.name(result)

    def some_examples(self) -> str | None:
        """Returns a tensor that is positive if any worker has examples; None if no other worker takes part in the step.

        It shares the message of a sum or mean over examples that is reduced anyway; None if there is no such message.
        """
        # Workers know the size of a global batch.
        if self.parts.sizes is None or not self.reductions or self.step.is_global:
            return None
        by_examples = {self._weights[key][1] for key in self._weights if isinstance(key[0], Examples)}
        carrier = next((j for j in self.reductions if _takes_along(j) and j.weight in {None, *by_examples}), None)
        if carrier is None:  # a message of its own would cost more than the check is worth
            return None
        dtype = carrier.dtype
        with subgraph(self.editor, SOME_EXAMPLES) as f:
            local = ordered_sum([self.parts.size(f, k, dtype) for k in range(self.count)])
            total = None if carrier.weight is None else f.input(carrier.weight, dtype, [])
            result = tf.identity(local) if total is None else tf.math.divide_no_nan(local, total)
        return self.noted(f, SOME_EXAMPLES, PendingReductionKind.STATE, LocalPart(local, total), result, carrier.level)

    def require_even_parts(self, target: str, reason: str) -> None:
        """Makes the step raise an error if its replicas have different numbers of examples.

        Args:
            target: the tensor whose dependence on the batch is not known.
            reason: why it is not known.
        """
        if self.even_parts is not None or self.parts.sizes is None:
            return
        self.even_parts = EvenSharesRequired(
            target, reason, self.group.size, self.count, line=self.step.origin_of(node_of(target))
        )
        with subgraph(self.editor, "even_parts") as f:
            rows = [[self.parts.size(f, k, tf.float64) for k in range(self.count)]]
            for sizes in self.parts.apart.values():
                rows.append([tf.cast(f.input(size, tf.int64, []), tf.float64) for size in sizes])
            squares = [[size * size for size in sizes] for sizes in rows]
            moments = tf.stack([*map(ordered_sum, rows), *map(ordered_sum, squares)])
            result = tf.identity(moments)
        reduced = self.noted(f, EVEN_PARTS, PendingReductionKind.STATE, LocalPart(moments), result)
        with subgraph(self.editor, "even_parts/check") as g:
            total, of_squares = tf.split(g.input(reduced, tf.float64, [2 * len(rows)]), 2)
            is_uneven = tf.not_equal(self.group.size * of_squares, total * total)
            first = total[tf.argmax(tf.cast(is_uneven, tf.int32))]
            check = tf.debugging.Assert(~tf.reduce_any(is_uneven), [UNEVEN, tf.cast(first, tf.int64)])
        self.checks.append(g.name(check))
