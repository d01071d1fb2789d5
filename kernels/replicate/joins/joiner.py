"""Joiner: sums over a worker's replicas, and notes what is still to be summed over the workers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist.errors import RewriteError
from autodist.graph.editor import GraphEditor
from autodist.graph.names import node_of
from autodist.graph.parts import EvenParts, PendingReduction, PendingReductionKind, ReduceOp
from autodist.graph.propagation import (
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
from autodist.graph.stages import Stages
from autodist.graph.step import UNEVEN, Step
from autodist.graph.subgraph import SubgraphBuilder, Template, subgraph
from autodist.kernels.base import Context
from autodist.kernels.replicate.weights import ReplicaWeights
from autodist.kernels.sums import merged, nothing_like, ordered_sum

EVEN_PARTS = "even_parts"
"""Name of the join that checks whether all replicas have equal parts: the number of examples, and of its squares."""


SOME_EXAMPLES = "some_examples"
"""Name of the join that tells whether any worker has examples."""


def _takes_along(join: PendingReduction) -> bool:
    """Whether a number may travel in the bucket of a join: of the same dtype, and one that holds counts exactly."""
    is_plain = (
        join.kind is PendingReductionKind.STATE and join.merge is ReduceOp.ADD and not join.depth and not join.is_sparse
    )
    return is_plain and join.dtype in (tf.float32, tf.float64)


_MERGES = {ReducedBy.MAX: ReduceOp.MAX, ReducedBy.MIN: ReduceOp.MIN, ReducedBy.PRODUCT: ReduceOp.PRODUCT}


@dataclass(frozen=True)
class _Whole:
    """A tensor that stands for the joined value until a synchronizer gives it, and what is made of it."""

    joined: tf.Tensor
    result: tf.Tensor


@dataclass(frozen=True)
class _Local:
    """A worker's part of a join.

    Attributes:
        local: of its replicas.
        total: the sum of their weights, by which the sum of all parts is divided; None: it is not.
        merge: how the parts are merged.
        is_squared: whether the root is taken of the whole.
    """

    local: tf.Tensor
    total: tf.Tensor | None = None
    merge: ReduceOp = ReduceOp.ADD
    is_squared: bool = False

    def finished(self, value: tf.Tensor) -> _Whole:
        joined = tf.identity(value) if value is self.local else value
        return _Whole(joined, tf.sqrt(joined) if self.is_squared else joined)


class Joiner:
    """Joins tensors of one replicated graph.

    Attributes:
        joins: what has to be summed over the workers; empty where there is one.
        checks: nodes that stop a step whose parts cannot be joined.
        even_parts: why all replicas need equally many examples; None where they need not.
    """

    def __init__(
        self,
        editor: GraphEditor,
        item: Step,
        context: Context,
        stages: Stages,
        flows: Propagation,
        parts: ReplicaWeights,
        varying: frozenset[str],
    ) -> None:
        self.editor, self.item, self.context = editor, item, context
        self.stages, self.flows, self.parts, self.varying = stages, flows, parts, varying
        self.count = len(context.copied_replicas)
        self.joins: list[PendingReduction] = []
        self.checks: list[str] = []
        self.even_parts: EvenParts | None = None
        self._templates: dict[Hashable, Template] = {}
        self._weights: dict[tuple[Weight, tf.DType], tuple[list[str], str]] = {}

    def template(
        self, key: Hashable, dtypes: Sequence[tf.DType], build: Callable[..., Sequence[tf.Tensor]]
    ) -> Template:
        """The template of arithmetic that many variables need; made once for each kind."""
        if key not in self._templates:
            self._templates[key] = Template(dtypes, build)
        return self._templates[key]

    def require_known(self, name: str, kind: Kind) -> None:
        """Passes unless it is not known how a tensor joins, in a step of which nothing may be guessed.

        Raises:
            RewriteError: it is not known, or examples see those of their own replica alone.
        """
        if not self.item.is_whole:
            return
        if isinstance(kind, Joined | PerExample):
            if kind.mixed_at is not None:
                raise RewriteError(f"examples see one another in what {name} is made of (first at {kind.mixed_at!r})")
        elif isinstance(kind, Unknown):
            raise RewriteError(f"it is not known how {name} depends on the batch ({kind.reason})")

    def late_readers(self, name: str) -> list[str]:
        """The nodes that read a captured tensor and run once."""
        return sorted(c for c in self.editor.consumers(node_of(name)) if c in self.stages.once)

    def note(self, join: PendingReduction) -> None:
        """Notes a join that other workers have a part in."""
        if self.context.workers > 1:
            self.joins.append(join)

    def join_value(
        self,
        name: str,
        purpose: PendingReductionKind,
        captured: str,
        kind: Joined,
        copies: Sequence[str] | None = None,
        depth: int = 0,
    ) -> str:
        """One tensor over all replicas, as its kind joins; returns the tensor that holds the whole.

        Args:
            name: of the join.
            purpose: what the join is for.
            captured: the tensor.
            kind: how it joins.
            copies: the tensor that stands for `captured` in each local replica; None: the replica's own copy.
            depth: length of the chain of joins before it.

        Raises:
            RewriteError: other workers have a part in it, and its shape is not known.
        """
        self._require_sized(captured)
        with subgraph(self.editor, name) as f:
            made = self._locally(f, captured, kind, copies)
            whole = made.finished(made.local if made.total is None else tf.math.divide_no_nan(made.local, made.total))
        self.note(
            PendingReduction(
                name=name, kind=purpose, local=(f.name(made.local),), result=(f.name(whole.joined),),
                weight=None if made.total is None else f.name(made.total), level=self.level(captured),
                dtype=made.local.dtype, shape=made.local.shape,
                weight_dtype=None if made.total is None else made.total.dtype, merge=made.merge, depth=depth,
            )
        )  # fmt: skip
        return f.name(whole.result)

    def _require_sized(self, name: str) -> None:
        """Passes if a tensor can be joined over all workers, which send it as a part of one vector.

        Raises:
            RewriteError: its shape is not known.
        """
        shape = self.item.spec_of(name).shape
        if self.context.workers > 1 and not shape.is_fully_defined():
            raise RewriteError(
                f"{name!r} has the shape {shape}, and a sum or mean of the batch that the step goes on with is joined "
                "over all workers, for which its shape has to be known before the step runs. Give it one by "
                "tf.ensure_shape, or say the length of what is passed whole in input_signature."
            )

    def join_here(self, name: str, captured: str, kind: Joined, copies: Sequence[str] | None = None) -> str:
        """One tensor over the local replicas alone, as its kind joins; arguments as of `join_value`."""
        if self.count == 1 and copies is None:
            return captured
        with subgraph(self.editor, name) as f:
            made = self._locally(f, captured, kind, copies)
            whole = made.finished(made.local if made.total is None else tf.math.divide_no_nan(made.local, made.total))
        return f.name(whole.result)

    def _locally(self, f: SubgraphBuilder, captured: str, kind: Joined, copies: Sequence[str] | None) -> _Local:
        if copies is None:
            self.require_known(captured, kind)
        spec = self.item.spec_of(captured)
        names = copies or [self.parts.named(captured, k) for k in range(self.count)]
        values = [f.input(name, spec.dtype, spec.shape) for name in names]
        if not isinstance(kind, Reduced):
            return _Local(*self.weighted_sum(f, values, kind.weight if isinstance(kind, Mean) else None))
        if kind.by is ReducedBy.NORM:
            squares = [self.kept(f, tf.square(v), k) for k, v in enumerate(values)]
            return _Local(ordered_sum(squares), is_squared=True)
        merge = _MERGES[kind.by]
        return _Local(merged([self.kept(f, v, k, merge) for k, v in enumerate(values)], merge), merge=merge)

    def weighted_sum(
        self, f: SubgraphBuilder, values: Sequence[tf.Tensor], weight: Weight | None
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Σ w·v over the local replicas that have examples, and Σ w."""
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
        """The weight of each local replica and their sum, made once: joins that share a weight can share a bucket."""
        key = (weight, dtype)
        if key not in self._weights:
            with subgraph(self.editor, f"weight/{len(self._weights)}") as f:
                weights = [self.parts.weight(f, weight, k, dtype) for k in range(self.count)]
                total = ordered_sum(weights)
            self._weights[key] = ([f.name(w) for w in weights], f.name(total))
        return self._weights[key]

    def level(self, name: str) -> int:
        """The stage in which a captured tensor is made."""
        return self.stages.level_of(node_of(name))

    def kept(self, f: SubgraphBuilder, value: tf.Tensor, k: int, merge: ReduceOp = ReduceOp.ADD) -> tf.Tensor:
        """A local replica's value, or, if it has no examples, one that changes nothing where it is joined."""
        if not self.parts.sizes:
            return value
        return tf.where(self.parts.is_used(f, k), value, nothing_like(value, merge))

    def noted(
        self,
        f: SubgraphBuilder,
        name: str,
        kind: PendingReductionKind,
        local: tf.Tensor,
        total: tf.Tensor | None,
        result: tf.Tensor,
        level: int = 1,
    ) -> str:
        """Notes a join of what a fragment made; returns the tensor that is to be read."""
        self.note(
            PendingReduction(
                name=name, kind=kind, local=(f.name(local),), result=(f.name(result),),
                weight=None if total is None else f.name(total), level=level, dtype=local.dtype, shape=local.shape,
                weight_dtype=None if total is None else total.dtype,
            )
        )  # fmt: skip
        return f.name(result)

    def some_examples(self) -> str | None:
        """A tensor that is above 0 where any worker has examples; None where no other worker has a part in the step.

        It travels with a sum or a mean over examples that is joined anyway; None, too, where there is none.
        """
        if self.parts.sizes is None or not self.joins or self.item.is_global:  # of a global batch all know it before
            return None
        by_examples = {self._weights[key][1] for key in self._weights if isinstance(key[0], Examples)}
        beside = next((j for j in self.joins if _takes_along(j) and j.weight in {None, *by_examples}), None)
        if beside is None:  # a message of its own would cost more than the check is worth
            return None
        dtype = beside.dtype
        with subgraph(self.editor, SOME_EXAMPLES) as f:
            local = ordered_sum([self.parts.size(f, k, dtype) for k in range(self.count)])
            total = None if beside.weight is None else f.input(beside.weight, dtype, [])
            result = tf.identity(local) if total is None else tf.math.divide_no_nan(local, total)
        return self.noted(f, SOME_EXAMPLES, PendingReductionKind.STATE, local, total, result, beside.level)

    def require_even_parts(self, target: str, reason: str) -> None:
        """Stops a step whose replicas have different numbers of examples.

        Args:
            target: of which it is not known how it depends on the batch.
            reason: why.
        """
        if self.even_parts is not None or self.parts.sizes is None:
            return
        self.even_parts = EvenParts(
            target, reason, len(self.context.replicas), self.count, line=self.item.origin_of(node_of(target))
        )
        with subgraph(self.editor, "even_parts") as f:
            rows = [[self.parts.size(f, k, tf.float64) for k in range(self.count)]]
            for sizes in self.parts.apart.values():
                rows.append([tf.cast(f.input(size, tf.int64, []), tf.float64) for size in sizes])
            squares = [[size * size for size in sizes] for sizes in rows]
            moments = tf.stack([*map(ordered_sum, rows), *map(ordered_sum, squares)])
            result = tf.identity(moments)
        joined = self.noted(f, EVEN_PARTS, PendingReductionKind.STATE, moments, None, result)
        with subgraph(self.editor, "even_parts/check") as g:
            total, of_squares = tf.split(g.input(joined, tf.float64, [2 * len(rows)]), 2)
            is_uneven = tf.not_equal(len(self.context.replicas) * of_squares, total * total)
            first = total[tf.argmax(tf.cast(is_uneven, tf.int32))]
            check = tf.debugging.Assert(~tf.reduce_any(is_uneven), [UNEVEN, tf.cast(first, tf.int64)])
        self.checks.append(g.name(check))
