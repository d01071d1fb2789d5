"""Gradients: scales each loss so that the replicas' gradients only need to be summed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice

import tensorflow as tf

from autodist.errors import RewriteError
from autodist.graph.loss_terms import loss_kind
from autodist.graph.names import data_inputs, node_of, tensor
from autodist.graph.parts import PendingReduction, PendingReductionKind, RowJoin, VariableGradient
from autodist.graph.seeds import Undecided, calls_through_all_reduce, live_calls, seed_weight
from autodist.graph.subgraph import Template, subgraph
from autodist.kernels.replicate.reductions.loss_scales import LossScales, Seeds
from autodist.kernels.replicate.reductions.reducer import Reducer
from autodist.kernels.replicate.reductions.statistics import Statistics
from autodist.kernels.replicate.reductions.terms import TermSeeds
from autodist.kernels.sums import join_rows, ordered_sum, rows_of_examples, sum_of_sums
from autodist.layout import BatchShaped, Examples, Joined, Mean, PerExample, Replicated, Sum, Unknown, Weight
from autodist.logs.terminal import ALIKE_EVERYWHERE, EXPLAINS_DIFFERENCES

log = logging.getLogger("autodist")


class GradientReductions:
    """Reduces the gradients of one replicated graph, and other values that an update reads from the compute part."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer, self._scales = reducer, LossScales(reducer)
        self._seeds: dict[int, Seeds] = {}

    def weigh_losses(self) -> None:
        """Sets each gradient's seed to its replica's share of the batch, so that gradients only need to be summed.

        If no single weight fits the whole loss, each of its terms has a seed. Gradients with respect to other tensors
        than variables are not summed, but have such seeds, too.
        """
        reduced = {g.call for g in self._reducer.stages.gradients}
        added_up = reduced | calls_through_all_reduce(self._reducer.step, reduced)
        for k in live_calls(self._reducer.step):
            if self._reducer.step.gradient_calls[k].terms:
                TermSeeds(self._reducer, k).seed()
                self._seeds[k] = self._ones(k)
                continue
            weight = self._loss_kind(k, k in added_up)
            if weight is not None or k in added_up:
                self._weigh(k, weight)
        self._log_mixing(sorted(reduced))

    def _log_mixing(self, calls: Sequence[int]) -> None:
        """Logs if examples only see those of their own replica: the loss is not that of the whole batch then."""
        gradient_calls = [self._reducer.step.gradient_calls[k] for k in calls]
        made = [t for call in gradient_calls for t in (*call.targets, *(term.tensor for term in call.terms))]
        kinds = [self._reducer.flows.kind(t) for t in made]
        nodes = dict.fromkeys(k.mixed_at for k in kinds if isinstance(k, Sum | Mean | PerExample) and k.mixed_at)
        for node in nodes:
            assumed = self._assumed_rows(node)
            if assumed is None:
                log.info(
                    "examples see one another in the model, as in batch normalisation (first at node %r): each sees "
                    "only those of its own replica, as on one device that computes the replicas' parts one after the "
                    "other. To use the examples of all replicas, set BatchNormalization(synchronized=True) or read the "
                    "rows returned by tf.distribute.get_replica_context().all_gather(rows, axis=0).",
                    node, extra=ALIKE_EVERYWHERE | EXPLAINS_DIFFERENCES,
                )  # fmt: skip
            else:
                log.warning(
                    "a loss combines examples with values that are taken to be of the same examples (at node %r), and "
                    "each replica computes them from its own part of the batch: %s.",
                    node, assumed.reason.rstrip("."), extra=ALIKE_EVERYWHERE,
                )  # fmt: skip

    def _assumed_rows(self, node: str) -> BatchShaped | None:
        """Returns the kind of an input whose rows a node takes for those of the same examples, if it has one."""
        step, flows = self._reducer.step, self._reducer.flows
        inputs = step.graph_index.inputs(node) if node in step.graph_index.nodes else []
        return next((kind for kind in map(flows.kind, inputs) if isinstance(kind, BatchShaped)), None)

    def _loss_kind(self, call: int, is_reduced: bool) -> Weight | None:
        """Returns the weight of a mean, or None for a sum."""
        gradient_call, flows = self._reducer.step.gradient_calls[call], self._reducer.flows
        weight = seed_weight(self._reducer.step, flows, gradient_call, is_reduced)
        if not isinstance(weight, Undecided):
            return weight
        if not is_reduced:
            if node_of(weight.target) in self._reducer.stages.once:
                return None  # computed from reduced gradients, as for a natural gradient
            log.info(
                "a gradient of %s with respect to no variable is computed by each replica from its own examples: it is "
                "not known how %s depends on the batch (%s).", weight.target, weight.target, weight.reason,
                extra=ALIKE_EVERYWHERE,
            )  # fmt: skip
            return None
        for target in gradient_call.targets:
            kind = loss_kind(self._reducer.step, flows, target)
            reason = kind.reason if isinstance(kind, Unknown) else weight.reason
            log.warning(
                "%s: it is not known how the loss depends on the batch (%s); it is treated as a mean over examples, "
                "and batches that do not divide evenly raise an error. For a loss that compares examples, gather those "
                "of all replicas with tf.distribute.get_replica_context().all_gather(rows, axis=0).",
                target, reason, extra=ALIKE_EVERYWHERE,
            )  # fmt: skip
        self._reducer.require_even_parts(weight.target, weight.reason)
        return Examples()

    def _weigh(self, call: int, weight: Weight | None) -> None:
        seeds = self._ones(call) if weight is None else self._scales.of(call, weight)
        seed = self._reducer.step.gradient_calls[call].seed
        readers = {k: self._readers(seed, k) for k in range(self._reducer.count)}
        for k, made in enumerate(seeds.by_replica):
            self._reducer.editor.rewire(self._reducer.parts.named(tensor(seed), k), made, readers[k])
        self._seeds[call] = seeds

    def _ones(self, call: int) -> Seeds:
        """Returns the seeds of a sum: 1 for each replica that has examples."""
        dtype = self._reducer.step.spec_of(tensor(self._reducer.step.gradient_calls[call].seed)).dtype
        with subgraph(self._reducer.editor, f"loss_weight/{call}") as f:
            ones = [tf.cast(self._reducer.parts.is_used(f, k), dtype) for k in range(self._reducer.count)]
            total = ordered_sum(ones)
        return Seeds(tuple(f.name(one) for one in ones), f.name(total), dtype)

    def _readers(self, seed: str, k: int) -> list[str]:
        return sorted(self._reducer.editor.consumers(node_of(self._reducer.parts.named(tensor(seed), k))))

    def reduce_gradients(self) -> None:
        """Sums each gradient over the local replicas."""
        reductions = [
            self._reduce_gradient(position, gradient)
            for position, gradient in enumerate(self._reducer.stages.gradients)
        ]
        for gradient, pending in zip(self._reducer.stages.gradients, reductions, strict=True):
            for old, new in zip(gradient.tensors, pending.result, strict=True):
                self._reducer.editor.rewire(old, new, self._reducer.late_readers(old))
            self._reducer.note(pending)

    def _reduce_gradient(self, position: int, gradient: VariableGradient) -> PendingReduction:
        if isinstance(self._reducer.flows.kind(gradient.tensors[-1]), Mean):
            raise RewriteError(
                f"the gradient of {gradient.variable}, {gradient.tensors[-1]}, is a mean over the examples, so that "
                "those of the replicas do not add up to that of the whole batch. In a tf.custom_gradient, sum over the "
                "examples (tf.reduce_sum); a mean of the loss divides their cotangents by the size of the batch."
            )
        specs = [self._reducer.step.spec_of(t) for t in gradient.tensors]
        named = [self._reducer.parts.named(t, k) for k in range(self._reducer.count) for t in gradient.tensors]
        seeds = self._seeds[gradient.call]
        scale = [] if seeds.scale is None else [seeds.scale]
        sizes = self._sizes(gradient)
        made = self._sum_of(tuple(spec.dtype for spec in specs), gradient, seeds).splice(
            self._reducer.editor, f"gradient/{position}", [*scale, *seeds.counts, *sizes, *named]
        )
        shape = tf.TensorShape(self._reducer.step.by_name[gradient.variable].shape)
        divides = seeds.divides or (
            seeds.is_shared and self._scales.is_divided_by_own(gradient.call, gradient.variable)
        )
        return PendingReduction(
            name=f"{gradient.variable}/{position}",
            kind=PendingReductionKind.GRADIENT,
            local=tuple(made[: len(specs)]),
            result=tuple(made[len(specs) :]),
            weight=seeds.total if divides else None,
            level=self._reducer.stages.level[position],
            dtype=specs[-1].dtype,
            shape=specs[-1].shape if gradient.is_sparse else shape,
            group=self._reducer.group,
            variable=gradient.variable,
            index_dtype=specs[0].dtype if gradient.is_sparse else None,
            weight_dtype=seeds.dtype if divides else None,
            row_join=gradient.row_join,
            aligned=gradient.aligned,
        )

    def _sizes(self, gradient: VariableGradient) -> Sequence[str]:
        """Returns each local replica's number of examples, if rows of a replica without examples are to be dropped."""
        is_left_out = gradient.is_sparse and gradient.row_join is not RowJoin.ALIGNED
        return self._reducer.parts.sizes or () if is_left_out else ()

    def _sum_of(self, dtypes: tuple[tf.DType, ...], gradient: VariableGradient, seeds: Seeds) -> Template:
        """Returns a template that sums the local replicas' tensors of a gradient: the sums, and their replacements."""
        row_join, aligned = gradient.row_join, gradient.aligned
        scaled = [] if seeds.scale is None else [seeds.dtype]
        counted, sized = [tf.bool] * len(seeds.counts), [tf.int64] * len(self._sizes(gradient))
        leading = [*scaled, *counted, *sized]
        pipelines = self._reducer.context.placement.stages.pipelines

        def add(*tensors: tf.Tensor) -> list[tf.Tensor]:
            rest = iter(tensors)
            scale, counts, sizes = (list(islice(rest, len(part))) for part in (scaled, counted, sized))
            parts = list(rest)
            by_tensor = [parts[at :: len(dtypes)] for at in range(len(dtypes))]
            for k, is_counted in enumerate(counts):
                by_tensor[-1][k] = tf.where(is_counted, by_tensor[-1][k], tf.zeros([], dtypes[-1]))
            for k, size in enumerate(sizes):
                by_tensor[0][k], by_tensor[1][k] = rows_of_examples(by_tensor[0][k], by_tensor[1][k], size, aligned)
            dense = [sum_of_sums(by_tensor[0], pipelines)] if len(dtypes) == 1 else None
            local = dense or [*join_rows(row_join, aligned, *by_tensor)]
            local[-1:] = [local[-1] * tf.cast(s, dtypes[-1]) for s in scale] or local[-1:]
            return [*local, *([tf.identity(t) for t in local] if self._reducer.group.spans_workers else local)]

        key = ("sum", dtypes, row_join, aligned, *leading)
        return self._reducer.template(key, [*leading, *[*dtypes] * self._reducer.count], add)

    def reduce_boundary(self, statistics: Statistics) -> None:
        """Reduces other values that an update reads from the compute part: a loss that scales it, or must be finite.

        Text, from which no variable is computed, is handled by `OutputJoins.join_texts`.
        """
        reduced = {t for g in self._reducer.stages.gradients for t in g.tensors}
        needed: dict[str, str] = {}  # by tensor, its first reader
        reading = {name for one in self._reducer.replica_dependent for name in self._reducer.editor.consumers(one)}
        for name in sorted(reading & self._reducer.stages.once, key=self._reducer.stages.order.__getitem__):
            for read in data_inputs(self._reducer.editor[name]):
                is_of_replica = node_of(read) in self._reducer.replica_dependent and read not in reduced
                if is_of_replica and self._reducer.step.spec_of(read).dtype != tf.string:
                    needed.setdefault(read, name)
        for position, (name, reader) in enumerate(needed.items()):
            readers = self._reducer.late_readers(name)
            whole = self._whole(f"update_input/{position}", name, reader, statistics)
            self._reducer.editor.rewire(name, whole, readers)

    def _whole(self, label: str, name: str, reader: str, statistics: Statistics) -> str:
        """Returns the whole batch's value of a tensor that an update reads from the compute part."""
        kind = self._reducer.flows.kind(name)
        if isinstance(kind, Replicated) and not self._reducer.group.receivers:
            return name  # a replica-independent output of a function with other, replica-dependent outputs
        if isinstance(kind, Mean | Sum):
            return self._join(label, name, kind)
        statistic = statistics.find(name)
        if statistic is not None and statistic.is_arithmetic:
            return statistics.make(label, statistic, self._join)
        if isinstance(kind, PerExample):
            raise RewriteError(
                f"an optimizer's update ({reader}) reads {name}, which has a row for each example: the update computes "
                "with examples and with gradients, which are whole only after the examples. To compute a loss with "
                "new weights (a line search, an extra gradient), first assign these to the variable, and then compute "
                "the loss from the variable. Or use means or sums over the batch in the update."
            )
        why = kind.reason if isinstance(kind, Unknown) else "it is neither a sum nor a mean over the batch"
        raise RewriteError(
            f"an optimizer's update ({reader}) reads {name}, which differs between replicas and cannot be combined "
            f"({why}). Use a mean or a sum over the batch, or arithmetic on these, in the update instead."
        )

    def _join(self, label: str, name: str, kind: Joined, copies: Sequence[str] | None = None, depth: int = 0) -> str:
        return self._reducer.reduce_value(label, name, kind, copies, depth, PendingReductionKind.BOUNDARY)
