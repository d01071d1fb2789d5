"""Joiner: sums over a worker's replicas, and notes what is still to be summed over the workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence

import tensorflow as tf

from autodist.errors import RewriteError
from autodist.graph.editor import GraphEditor
from autodist.graph.fragment import Fragment, Template, fragment
from autodist.graph.item import Aggregation, Gradient, GraphItem, Join, JoinKind
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.propagation import Examples, Kind, Mean, PerExample, Propagation, Replicated, Sum, Unknown, Weight
from autodist.graph.stages import Stages
from autodist.kernels.base import Context
from autodist.kernels.state_writes import StateChange
from autodist.kernels.sums import ordered_sum
from autodist.kernels.weights import Parts

log = logging.getLogger("autodist")

EVEN_PARTS = "even_parts"
"""Name of the join that checks whether all replicas have equal parts: the number of examples, and of its squares."""

_ADDING = ("Add", "AddV2", "AddN", "Identity")
"""Ops through which a loss is the sum of its terms."""


class Joiner:
    """Joins tensors of one replicated graph.

    Attributes:
        joins: what has to be summed over the workers; empty where there is one.
        checks: nodes that stop a step whose parts cannot be joined.
    """

    def __init__(
        self,
        editor: GraphEditor,
        item: GraphItem,
        context: Context,
        stages: Stages,
        flows: Propagation,
        parts: Parts,
        varying: frozenset[str],
    ) -> None:
        self.editor, self.item, self.context = editor, item, context
        self.stages, self.flows, self.parts, self.varying = stages, flows, parts, varying
        self.count = len(context.copied_replicas)
        self.joins: list[Join] = []
        self.checks: list[str] = []
        self._divisors: dict[int, tuple[str, tf.DType] | None] = {}
        self._templates: dict[Hashable, Template] = {}
        self._weights: dict[tuple[Weight, tf.DType], tuple[list[str], str]] = {}

    # -- gradients -------------------------------------------------------------------------------------------------

    def weigh_losses(self) -> None:
        """Seeds each gradient with the weight of its replica's part, so that the gradients need only be added.

        The seed of a mean is the number of examples, and the sum over all replicas is divided by the sum of the seeds;
        on a single worker that sum is known, and the seeds are divided instead.
        """
        calls = sorted({g.call for g in self.stages.gradients})
        for k in calls:
            self._weigh(k, self._loss_kind(k))

    def _loss_kind(self, call: int) -> Weight | None:
        """The weight of a mean, or None for a sum."""
        targets = self.item.gradient_calls[call].targets
        kinds = [self.flows.kind(t) for t in targets]
        weights = {k.weight for k in kinds if isinstance(k, Mean)}
        if all(isinstance(k, Sum | PerExample) for k in kinds):
            return None
        if len(weights) == 1 and all(isinstance(k, Mean | Replicated) for k in kinds):
            return weights.pop()
        if all(isinstance(k, Replicated) for k in kinds):
            return Examples()
        for target, kind in zip(targets, kinds, strict=True):
            self._require_no_mixed_sum(target)
            reason = kind.reason if isinstance(kind, Unknown) else "its targets are means with different weights"
            log.warning(
                "%s: it is not known how the loss depends on the batch (%s); it is taken for a mean over examples, and "
                "batches that do not divide evenly are refused.", target, reason,
            )  # fmt: skip
        self._require_even_parts()
        return Examples()

    def _require_no_mixed_sum(self, target: str) -> None:
        """A sum over the batch counts once, a penalty once in all: no weight of the replicas suits both.

        Raises:
            RewriteError: the loss adds a sum over the batch and something else.
        """
        terms = self._terms(target)
        sums = [t for t in terms if isinstance(self.flows.kind(t), Sum)]
        if sums and len(sums) < len(terms):
            other = next(t for t in terms if t not in sums)
            raise RewriteError(
                f"the loss {target} adds {sums[0]}, a sum over the batch, and {other}, which is none: replicas would "
                "count the second as often as there are of them. Make the loss a mean over the batch (divide the sum "
                "by the number of examples, or leave Keras's reduction at 'sum_over_batch_size') and weigh the other "
                "term to suit."
            )

    def _terms(self, target: str) -> list[str]:
        """The tensors that are added up to a target."""
        found: list[str] = []
        front = [tensor(target)]
        while front:
            name = front.pop()
            node = self.editor[node_of(name)]
            if node.op in _ADDING:
                front += [tensor(i) for i in node.input if not is_control(i)]
            else:
                found.append(name)
        return sorted(found)

    def _weigh(self, call: int, weight: Weight | None) -> None:
        seed = self.item.gradient_calls[call].seed
        dtype = self.item.spec_of(tensor(seed)).dtype
        readers = {k: self._readers(seed, k) for k in range(self.count)}
        with fragment(self.editor, f"loss_weight/{call}") as f:
            weights = [self._seed(f, weight, k, dtype) for k in range(self.count)]
            total = ordered_sum(weights)
            if weight is not None and self.context.workers == 1:
                weights = [tf.math.divide_no_nan(w, total) for w in weights]
        for k, made in enumerate(weights):
            self.editor.rewire(self.parts.named(tensor(seed), k), f.name(made), readers[k])
        alone = weight is None or self.context.workers == 1
        self._divisors[call] = None if alone else (f.name(total), dtype)

    def _seed(self, f: Fragment, weight: Weight | None, k: int, dtype: tf.DType) -> tf.Tensor:
        if weight is None:
            return tf.cast(self.parts.is_used(f, k), dtype)
        return self.parts.weight(f, weight, k, dtype)

    def _readers(self, seed: str, k: int) -> list[str]:
        return sorted(self.editor.consumers(node_of(self.parts.named(tensor(seed), k))))

    def join_gradients(self) -> None:
        """Adds up each gradient over the local replicas."""
        joins = [self._join_gradient(position, gradient) for position, gradient in enumerate(self.stages.gradients)]
        for gradient, join in zip(self.stages.gradients, joins, strict=True):
            for old, new in zip(gradient.tensors, join.result, strict=True):
                self.editor.rewire(old, new, self._late_readers(old))
            self._note(join)

    def _join_gradient(self, position: int, gradient: Gradient) -> Join:
        specs = [self.item.spec_of(t) for t in gradient.tensors]
        named = [self.parts.named(t, k) for k in range(self.count) for t in gradient.tensors]
        made = self._sum_of(tuple(spec.dtype for spec in specs)).splice(self.editor, f"gradient/{position}", named)
        shape = tf.TensorShape(self.item.by_name[gradient.variable].shape)
        divisor = self._divisors[gradient.call]
        return Join(
            name=f"{gradient.variable}/{position}",
            kind=JoinKind.GRADIENT,
            local=tuple(made[: len(specs)]),
            result=tuple(made[len(specs) :]),
            weight=divisor[0] if divisor else None,
            level=self.stages.level[position],
            dtype=specs[-1].dtype,
            shape=specs[-1].shape if gradient.is_sparse else shape,
            variable=gradient.variable,
            index_dtype=specs[0].dtype if gradient.is_sparse else None,
            weight_dtype=divisor[1] if divisor else None,
        )

    def _sum_of(self, dtypes: tuple[tf.DType, ...]) -> Template:
        """Adds up the local replicas' tensors of a gradient: the sums, and what is to be read in their place."""

        def add(*tensors: tf.Tensor) -> list[tf.Tensor]:
            by_tensor = [tensors[at :: len(dtypes)] for at in range(len(dtypes))]
            local = [_together(parts, is_sparse=len(dtypes) == 2) for parts in by_tensor]
            return [*local, *([tf.identity(t) for t in local] if self.context.workers > 1 else local)]

        return self._template(("sum", dtypes), [*dtypes] * self.count, add)

    def _template(
        self, key: Hashable, dtypes: Sequence[tf.DType], build: Callable[..., Sequence[tf.Tensor]]
    ) -> Template:
        """One for each kind of arithmetic that many variables need."""
        if key not in self._templates:
            self._templates[key] = Template(dtypes, build)
        return self._templates[key]

    def _late_readers(self, name: str) -> list[str]:
        """What reads a captured tensor and runs once."""
        return sorted(c for c in self.editor.consumers(node_of(name)) if c in self.stages.once)

    def _note(self, join: Join) -> None:
        if self.context.workers > 1:
            self.joins.append(join)

    # -- boundary --------------------------------------------------------------------------------------------------

    def join_boundary(self) -> None:
        """Joins what an update asks of the compute part besides gradients: a loss that scales it, say."""
        joined = {t for g in self.stages.gradients for t in g.tensors}
        asked: dict[str, None] = {}
        for name in sorted(self.stages.once, key=self.stages.order.__getitem__):
            if name in self.editor:
                asked.update(
                    dict.fromkeys(
                        tensor(i) for i in self.editor[name].input
                        if not is_control(i) and node_of(i) in self.varying and tensor(i) not in joined
                    )
                )  # fmt: skip
        for position, name in enumerate(asked):
            kind = self.flows.kind(name)
            if not isinstance(kind, Mean | Sum):
                why = kind.reason if isinstance(kind, Unknown) else f"it is {kind}"
                raise RewriteError(
                    f"an optimizer's update reads {name}, which differs between replicas and cannot be combined "
                    f"({why}). Give the update a mean or a sum over the batch instead."
                )
            readers = self._late_readers(name)
            result = self._join_value(f"boundary/{position}", JoinKind.BOUNDARY, name, kind)
            self.editor.rewire(name, result, readers)

    def _join_value(self, name: str, purpose: JoinKind, captured: str, kind: Kind) -> str:
        """A mean or sum of one tensor over all replicas; returns the tensor that holds it."""
        weight = kind.weight if isinstance(kind, Mean) else None
        with fragment(self.editor, name) as f:
            values = [self.parts.tensor(f, captured, k) for k in range(self.count)]
            local, total = self._weighted_sum(f, values, weight)
            result = tf.identity(local) if total is None else tf.math.divide_no_nan(local, total)
        return self._noted(f, name, purpose, local, total, result, self._level(captured))

    def _weighted_sum(
        self, f: Fragment, values: Sequence[tf.Tensor], weight: Weight | None
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Σ w·v over the local replicas that have examples, and Σ w."""
        if weight is None:
            kept = [self._kept(f, v, k) for k, v in enumerate(values)]
            return ordered_sum(kept), None
        return self._weighed(f, values, weight)

    def _weighed(self, f: Fragment, values: Sequence[tf.Tensor], weight: Weight) -> tuple[tf.Tensor, tf.Tensor]:
        dtype = values[0].dtype
        names, total = self._weights_of(weight, dtype)
        weights = [f.input(name, dtype, []) for name in names]
        terms = [tf.math.multiply_no_nan(v, w) for v, w in zip(values, weights, strict=True)]
        return ordered_sum(terms), f.input(total, dtype, [])

    def _weights_of(self, weight: Weight, dtype: tf.DType) -> tuple[list[str], str]:
        """The weight of each local replica and their sum, made once: joins that share a weight can share a bucket."""
        key = (weight, dtype)
        if key not in self._weights:
            with fragment(self.editor, f"weight/{len(self._weights)}") as f:
                weights = [self.parts.weight(f, weight, k, dtype) for k in range(self.count)]
                total = ordered_sum(weights)
            self._weights[key] = ([f.name(w) for w in weights], f.name(total))
        return self._weights[key]

    def _level(self, name: str) -> int:
        return self.stages.levels.get(node_of(name), 1)

    def _kept(self, f: Fragment, value: tf.Tensor, k: int) -> tf.Tensor:
        return tf.where(self.parts.is_used(f, k), value, tf.zeros_like(value)) if self.parts.sizes else value

    def _noted(
        self,
        f: Fragment,
        name: str,
        kind: JoinKind,
        local: tf.Tensor,
        total: tf.Tensor | None,
        result: tf.Tensor,
        level: int = 1,
    ) -> str:
        self._note(
            Join(
                name=name, kind=kind, local=(f.name(local),), result=(f.name(result),),
                weight=None if total is None else f.name(total), level=level, dtype=local.dtype, shape=local.shape,
                weight_dtype=None if total is None else total.dtype,
            )
        )  # fmt: skip
        return f.name(result)

    # -- state -----------------------------------------------------------------------------------------------------

    def join_state(self, changes: Sequence[StateChange]) -> None:
        """Combines what the compute part writes, as the variable declares it."""
        combined = []
        with fragment(self.editor, "state") as f:
            for change in changes:
                with tf.name_scope(f"{change.variable.handle}/joined"):
                    combined.append(self._combine(f, change, self._aggregation(change)))
        for change, value in zip(changes, combined, strict=True):
            write = self.editor[change.write]
            placeholder = node_of(write.input[1])
            self.editor.set_inputs(change.write, [write.input[0], value, *write.input[2:]])
            self.editor.remove([placeholder])

    @staticmethod
    def _aggregation(change: StateChange) -> Aggregation:
        variable = change.variable
        if variable.aggregation is not Aggregation.NONE:
            return variable.aggregation
        return Aggregation.MEAN if variable.dtype.is_floating else Aggregation.ONLY_FIRST_REPLICA

    def _combine(self, f: Fragment, change: StateChange, aggregation: Aggregation) -> str:
        variable = change.variable
        if aggregation is Aggregation.SUM and change.added and not isinstance(self.flows.kind(change.added), Sum):
            whole = self._added_of_whole(change, change.added)
            if whole is not None:
                return whole
        if aggregation is Aggregation.MEAN:
            return self._mean_of_states(change)
        before = f.input(change.before, variable.dtype, variable.shape)
        after = [f.input(self.parts.named(change.after, k), variable.dtype, variable.shape) for k in range(self.count)]
        if aggregation is Aggregation.SUM:
            local = self._sum_of_added(f, change, before, after)
            result = tf.identity(local)
        else:
            is_first = self.context.worker == self.context.computing[0]
            local = after[0] if is_first else tf.zeros_like(after[0])
            result = tf.identity(after[0])
        name = f"state/{variable.handle}/joined"
        joined = self._noted(f, name, JoinKind.STATE, local, None, result, self._level(change.after))
        return f.name(before + result) if aggregation is Aggregation.SUM else joined

    def _mean_of_states(self, change: StateChange) -> str:
        """The mean of what the replicas leave, by their numbers of examples; without any the variable stays."""
        variable, count = change.variable, self.count

        def mean(before: tf.Tensor, total: tf.Tensor, *rest: tf.Tensor) -> list[tf.Tensor]:
            terms = [tf.math.multiply_no_nan(v, w) for v, w in zip(rest[:count], rest[count:], strict=True)]
            local = ordered_sum(terms)
            return [local, tf.where(total > 0, tf.math.divide_no_nan(local, total), before)]

        weights, total = self._weights_of(Examples(), variable.dtype)
        after = [self.parts.named(change.after, k) for k in range(count)]
        template = self._template(("mean", variable.dtype), [variable.dtype] * (2 + 2 * count), mean)
        name = f"state/{variable.handle}/joined"
        local, result = template.splice(self.editor, name, [change.before, total, *after, *weights])
        self._note(
            Join(
                name=name, kind=JoinKind.STATE, local=(local,), result=(result,), weight=total,
                level=self._level(change.after), dtype=variable.dtype, shape=tf.TensorShape(variable.shape),
                weight_dtype=variable.dtype,
            )
        )  # fmt: skip
        return result

    def _added_of_whole(self, change: StateChange, added: str) -> str | None:
        """What one device would have added, where that is arithmetic of means and sums over the batch.

        Keras adds loss · examples to its running loss. The loss of the whole batch is a mean with weights of its own,
        and not Σ loss · examples over the replicas: the means and sums are joined, and the arithmetic is done once on
        these.
        """
        found = self._means_and_sums_behind(added)
        if found is None:
            return None
        values, arithmetic = found
        name = f"state/{change.variable.handle}/whole"
        joined = {
            t: self._join_value(f"{name}/{k}", JoinKind.STATE, t, self.flows.kind(t)) for k, t in enumerate(values)
        }
        clones = self.editor.clone(arithmetic, f"autodist/{name}/", lambda i: joined.get(tensor(i), i))
        dtype, shape = change.variable.dtype, change.variable.shape
        with fragment(self.editor, f"{name}/added") as f:
            once = tensor(added).replace(node_of(added), clones[node_of(added)], 1)
            result = f.input(change.before, dtype, shape) + f.input(once, dtype, shape)
        return f.name(result)

    def _means_and_sums_behind(self, name: str) -> tuple[list[str], list[str]] | None:
        """The tensors of known kind that `name` is made from, and the nodes between; None if others are among them."""
        values: dict[str, None] = {}
        between: dict[str, None] = {node_of(name): None}
        front = [node_of(name)]
        while front:
            for i in self.editor[front.pop()].input:
                source, kind = node_of(i), None if is_control(i) else self.flows.kind(i)
                if kind is None or isinstance(kind, Replicated):
                    continue
                if isinstance(kind, Mean | Sum):
                    values[tensor(i)] = None
                elif isinstance(kind, Unknown) and self.item.spec_of(tensor(i)).shape.is_fully_defined():
                    if source not in between:
                        between[source] = None
                        front.append(source)
                else:
                    return None
        return (list(values), list(between)) if values else None

    def _sum_of_added(
        self, f: Fragment, change: StateChange, before: tf.Tensor, after: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        variable = change.variable
        if change.added is None:
            added = [a - before for a in after]
        else:
            added = [
                f.input(self.parts.named(change.added, k), variable.dtype, variable.shape) for k in range(self.count)
            ]
        kept = [self._kept(f, a, k) for k, a in enumerate(added)]
        return ordered_sum(kept)

    # -- outputs ---------------------------------------------------------------------------------------------------

    def join_outputs(self) -> list[str]:
        """The step's outputs as the script expects them: joined over the local replicas, scalars over all workers."""
        return [
            self._join_output(position, name) if node_of(name) in self.varying else name
            for position, name in enumerate(self.item.outputs)
        ]

    def _join_output(self, position: int, name: str) -> str:
        kind, spec = self.flows.kind(name), self.item.spec_of(name)
        if isinstance(kind, Unknown):
            kind = self._guess(name, kind)
        if isinstance(kind, Mean | Sum) and self.context.joins_outputs and spec.shape.rank == 0:
            return self._join_value(f"output/{position}", JoinKind.STATE, name, kind)
        if not self.context.computes:
            return self._nothing(position, spec)
        if isinstance(kind, PerExample):
            return self._concatenated(position, name, kind.axis)
        if not isinstance(kind, Mean | Sum):
            return name
        if self.count == 1:
            return name
        with fragment(self.editor, f"output/{position}") as f:
            values = [self.parts.tensor(f, name, k) for k in range(self.count)]
            local, total = self._weighted_sum(f, values, kind.weight if isinstance(kind, Mean) else None)
            result = local if total is None else tf.math.divide_no_nan(local, total)
        return f.name(result)

    def _nothing(self, position: int, spec: tf.TensorSpec) -> str:
        """What a worker without replicas has of them: no rows, a mean or sum of 0."""
        shape = [length or 0 for length in spec.shape.as_list()] if spec.shape.rank is not None else []
        with fragment(self.editor, f"output/{position}") as f:
            nothing = tf.zeros(shape, spec.dtype)
        return f.name(nothing)

    def _guess(self, name: str, kind: Unknown) -> Kind:
        """What is done with an output of unknown kind: float scalars are averaged, the rest is the first replica's."""
        spec = self.item.spec_of(name)
        averaged = spec.dtype.is_floating and spec.shape.rank == 0
        how = "averaged over the replicas" if averaged else "taken from the first replica"
        log.warning("output %s is %s: it is not known how it depends on the batch (%s).", name, how, kind.reason)
        return Mean(Examples()) if averaged else Replicated()

    def _concatenated(self, position: int, name: str, axis: int) -> str:
        with fragment(self.editor, f"output/{position}") as f:
            values = [self.parts.tensor(f, name, k) for k in range(self.count)]
            if self.parts.sizes is not None:
                values = [self._true_rows(f, v, axis, k) for k, v in enumerate(values)]
            whole = tf.concat(values, axis) if len(values) > 1 else values[0]
        return f.name(whole)

    def _true_rows(self, f: Fragment, value: tf.Tensor, axis: int, k: int) -> tf.Tensor:
        """No rows, where the replica has no examples and computed on a row that is not its own."""
        rows = tf.shape(value, out_type=tf.int64)[axis] * tf.cast(self.parts.is_used(f, k), tf.int64)
        length = [rows if a == axis else tf.constant(-1, tf.int64) for a in range(value.shape.rank)]
        return tf.slice(value, tf.zeros([value.shape.rank], tf.int64), tf.stack(length))

    # -- checks ----------------------------------------------------------------------------------------------------

    def _require_even_parts(self) -> None:
        """Stops a step whose replicas have different numbers of examples."""
        if self.checks or self.parts.sizes is None:
            return
        with fragment(self.editor, "even_parts") as f:
            sizes = [self.parts.size(f, k, tf.float64) for k in range(self.count)]
            moments = tf.stack([ordered_sum(sizes), ordered_sum([s * s for s in sizes])])
            result = tf.identity(moments)
        joined = self._noted(f, EVEN_PARTS, JoinKind.STATE, moments, None, result)
        with fragment(self.editor, "even_parts/check") as g:
            total = g.input(joined, tf.float64, [2])
            check = tf.debugging.Assert(
                tf.equal(len(self.context.replicas) * total[1], total[0] * total[0]),
                ["the replicas have different numbers of examples, and it is not known how the loss depends on them"],
            )
        self.checks.append(g.name(check))


def _together(parts: Sequence[tf.Tensor], *, is_sparse: bool) -> tf.Tensor:
    """What replicas have of a gradient: dense ones are added, rows stand one after the other."""
    if len(parts) == 1:
        return parts[0]
    return tf.concat(parts, 0) if is_sparse else ordered_sum(parts)
