"""Gradients: each loss is weighed, so that the replicas' gradients need only be added."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import tensorflow as tf

from autodist.errors import RewriteError
from autodist.graph.fragment import Fragment, Template, fragment
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.parts import Gradient, Join, JoinKind
from autodist.graph.propagation import Examples, Mean, PerExample, Replicated, Sum, Unknown, Weight
from autodist.kernels.joins.joiner import Joiner
from autodist.kernels.joins.terms import TermSeeds
from autodist.kernels.sums import ordered_sum, rows_together
from autodist.messages import ALIKE_EVERYWHERE

log = logging.getLogger("autodist")


class GradientJoins:
    """Joins the gradients of one replicated graph, and whatever else an update asks of the compute part."""

    def __init__(self, joiner: Joiner) -> None:
        self._joiner = joiner
        self._divisors: dict[int, tuple[str, tf.DType] | None] = {}

    def weigh_losses(self) -> None:
        """Seeds each gradient with the weight of its replica's part, so that the gradients need only be added.

        The seed of a mean is the number of examples, and the sum over all replicas is divided by the sum of the seeds;
        on a single worker that sum is known, and the seeds are divided instead. Where no one weight suits all of a
        loss, each of its terms has a seed.
        """
        calls = sorted({g.call for g in self._joiner.stages.gradients})
        for k in calls:
            if self._joiner.item.gradient_calls[k].terms:
                TermSeeds(self._joiner, k).seed()
                self._divisors[k] = None
            else:
                self._weigh(k, self._loss_kind(k))
        self._tell_of_mixing(calls)

    def _tell_of_mixing(self, calls: Sequence[int]) -> None:
        """Says where examples see only those of their own replica: the loss is not that of the whole batch there."""
        targets = [t for k in calls for t in self._joiner.item.gradient_calls[k].targets]
        kinds = [self._joiner.flows.kind(t) for t in targets]
        nodes = dict.fromkeys(k.mixed_at for k in kinds if isinstance(k, Sum | Mean | PerExample) and k.mixed_at)
        for node in nodes:
            log.info(
                "examples see one another in the model, as in batch normalisation (first at node %r): each sees those "
                "of its own replica alone, as on one device that computes the replicas' parts one after the other.",
                node, extra=ALIKE_EVERYWHERE,
            )  # fmt: skip

    def _loss_kind(self, call: int) -> Weight | None:
        """The weight of a mean, or None for a sum."""
        targets = self._joiner.item.gradient_calls[call].targets
        kinds = [self._joiner.flows.kind(t) for t in targets]
        weights = {k.weight for k in kinds if isinstance(k, Mean)}
        if all(isinstance(k, Sum | PerExample) for k in kinds):
            return None
        if len(weights) == 1 and all(isinstance(k, Mean | Replicated) for k in kinds):
            return weights.pop()
        if all(isinstance(k, Replicated) for k in kinds):
            return Examples()
        for target, kind in zip(targets, kinds, strict=True):
            reason = kind.reason if isinstance(kind, Unknown) else "its targets are means with different weights"
            log.warning(
                "%s: it is not known how the loss depends on the batch (%s); it is taken for a mean over examples, and "
                "batches that do not divide evenly are refused.", target, reason, extra=ALIKE_EVERYWHERE,
            )  # fmt: skip
        self._joiner.require_even_parts()
        return Examples()

    def _weigh(self, call: int, weight: Weight | None) -> None:
        seed = self._joiner.item.gradient_calls[call].seed
        dtype = self._joiner.item.spec_of(tensor(seed)).dtype
        readers = {k: self._readers(seed, k) for k in range(self._joiner.count)}
        with fragment(self._joiner.editor, f"loss_weight/{call}") as f:
            weights = [self._seed(f, weight, k, dtype) for k in range(self._joiner.count)]
            total = ordered_sum(weights)
            if weight is not None and self._joiner.context.workers == 1:
                weights = [tf.math.divide_no_nan(w, total) for w in weights]
        for k, made in enumerate(weights):
            self._joiner.editor.rewire(self._joiner.parts.named(tensor(seed), k), f.name(made), readers[k])
        alone = weight is None or self._joiner.context.workers == 1
        self._divisors[call] = None if alone else (f.name(total), dtype)

    def _seed(self, f: Fragment, weight: Weight | None, k: int, dtype: tf.DType) -> tf.Tensor:
        if weight is None:
            return tf.cast(self._joiner.parts.is_used(f, k), dtype)
        return self._joiner.parts.weight(f, weight, k, dtype)

    def _readers(self, seed: str, k: int) -> list[str]:
        return sorted(self._joiner.editor.consumers(node_of(self._joiner.parts.named(tensor(seed), k))))

    def join_gradients(self) -> None:
        """Adds up each gradient over the local replicas."""
        joins = [
            self._join_gradient(position, gradient) for position, gradient in enumerate(self._joiner.stages.gradients)
        ]
        for gradient, join in zip(self._joiner.stages.gradients, joins, strict=True):
            for old, new in zip(gradient.tensors, join.result, strict=True):
                self._joiner.editor.rewire(old, new, self._joiner.late_readers(old))
            self._joiner.note(join)

    def _join_gradient(self, position: int, gradient: Gradient) -> Join:
        specs = [self._joiner.item.spec_of(t) for t in gradient.tensors]
        named = [self._joiner.parts.named(t, k) for k in range(self._joiner.count) for t in gradient.tensors]
        made = self._sum_of(tuple(spec.dtype for spec in specs), gradient).splice(
            self._joiner.editor, f"gradient/{position}", named
        )
        shape = tf.TensorShape(self._joiner.item.by_name[gradient.variable].shape)
        divisor = self._divisors[gradient.call]
        return Join(
            name=f"{gradient.variable}/{position}",
            kind=JoinKind.GRADIENT,
            local=tuple(made[: len(specs)]),
            result=tuple(made[len(specs) :]),
            weight=divisor[0] if divisor else None,
            level=self._joiner.stages.level[position],
            dtype=specs[-1].dtype,
            shape=specs[-1].shape if gradient.is_sparse else shape,
            variable=gradient.variable,
            index_dtype=specs[0].dtype if gradient.is_sparse else None,
            weight_dtype=divisor[1] if divisor else None,
            row_join=gradient.row_join,
            aligned=gradient.aligned,
        )

    def _sum_of(self, dtypes: tuple[tf.DType, ...], gradient: Gradient) -> Template:
        """Adds up the local replicas' tensors of a gradient: the sums, and what is to be read in their place."""
        row_join, aligned = gradient.row_join, gradient.aligned

        def add(*tensors: tf.Tensor) -> list[tf.Tensor]:
            by_tensor = [tensors[at :: len(dtypes)] for at in range(len(dtypes))]
            local = [ordered_sum(by_tensor[0])] if len(dtypes) == 1 else rows_together(row_join, aligned, *by_tensor)
            return [*local, *([tf.identity(t) for t in local] if self._joiner.context.workers > 1 else local)]

        return self._joiner.template(("sum", dtypes, row_join, aligned), [*dtypes] * self._joiner.count, add)

    def join_boundary(self) -> None:
        """Joins what an update asks of the compute part besides gradients: a loss that scales it, say."""
        joined = {t for g in self._joiner.stages.gradients for t in g.tensors}
        asked: dict[str, None] = {}
        reading = {name for varying in self._joiner.varying for name in self._joiner.editor.consumers(varying)}
        for name in sorted(reading & self._joiner.stages.once, key=self._joiner.stages.order.__getitem__):
            asked.update(
                dict.fromkeys(
                    tensor(i) for i in self._joiner.editor[name].input
                    if not is_control(i) and node_of(i) in self._joiner.varying and tensor(i) not in joined
                )
            )  # fmt: skip
        for position, name in enumerate(asked):
            kind = self._joiner.flows.kind(name)
            if not isinstance(kind, Mean | Sum):
                why = kind.reason if isinstance(kind, Unknown) else f"it is {kind}"
                raise RewriteError(
                    f"an optimizer's update reads {name}, which differs between replicas and cannot be combined "
                    f"({why}). Give the update a mean or a sum over the batch instead."
                )
            readers = self._joiner.late_readers(name)
            result = self._joiner.join_value(f"boundary/{position}", JoinKind.BOUNDARY, name, kind)
            self._joiner.editor.rewire(name, result, readers)
