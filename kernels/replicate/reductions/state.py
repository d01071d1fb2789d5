"""StateReductions: combines values that replicas write to a variable, by its `aggregation` or as one device would."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import tensorflow as tf

from autodist.errors import RewriteError
from autodist.graph.names import node_of
from autodist.graph.parts import Aggregation, GradientCall, PendingReduction, PendingReductionKind, Variable
from autodist.graph.read_again import writes_read_again
from autodist.graph.seeds import Undecided, reduced_calls, seed_weight
from autodist.graph.subgraph import SubgraphBuilder, subgraph
from autodist.graph.walks import reach
from autodist.kernels.replicate.reductions.global_state import GlobalState
from autodist.kernels.replicate.reductions.reducer import LocalPart, Reducer
from autodist.kernels.replicate.state_writes import StateChange
from autodist.kernels.sums import ordered_sum
from autodist.layout import Examples, Mean, PerExample, Replicated, Sum, Unknown, Weight
from autodist.layout.batch_degree import BatchDegree
from autodist.logs.terminal import ALIKE_EVERYWHERE

log = logging.getLogger("autodist")

_GUESSES = {
    Aggregation.MEAN: "the mean of the replicas' values",
    Aggregation.SUM: "the sum of the replicas' changes",
    Aggregation.ONLY_FIRST_REPLICA: "the first replica's value",
}


class StateReductions:
    """Reduces the values that the replicas of one graph write to variables."""

    def __init__(self, reducer: Reducer, whole: GlobalState) -> None:
        self._reducer, self._whole = reducer, whole
        self._degree = BatchDegree(reducer.step, reducer.flows)
        self._averaged: dict[str, list[str]] = {}
        self._summed: dict[str, list[str]] = {}

    def reduce_state(self, changes: Sequence[StateChange]) -> None:
        """Combines the writes of the compute part, as the variable's `aggregation` declares or as one device would."""
        combined = []
        whole = self._whole
        with subgraph(self._reducer.editor, "state") as f:
            for change in changes:
                with tf.name_scope(f"{change.label}/joined"):
                    combined.append(self._combine(f, change, whole))
        self._warn_of_averages()
        self._warn_of_local_values()
        for change, value in zip(changes, combined, strict=True):
            write = self._reducer.editor[change.write]
            placeholder = node_of(write.input[1])
            self._reducer.editor.set_inputs(change.write, [write.input[0], value, *write.input[2:]])
            self._reducer.editor.remove([placeholder])

    def _combine(self, f: SubgraphBuilder, change: StateChange, whole: GlobalState) -> str:
        declared, only_adds = change.variable.aggregation, change.in_all.base is None
        if declared not in (Aggregation.NONE, Aggregation.SUM):
            return self._as_declared(f, change, declared)
        if declared is Aggregation.SUM and only_adds and self._adds_sums(change):
            return self._sum_of_changes(f, change)
        if change.variable.is_overwritten and (call := self._find_scaled_gradient(change)) is not None:
            raise _not_known(change.variable, f"it is computed from gradients of {call.targets[0]}")
        unknown = whole.unknown(change)
        if unknown is not None:
            self._reducer.require_known(change.variable.name, Unknown(unknown))
        if unknown is not None and declared is Aggregation.SUM and self._takes_averages(change, unknown):
            unknown = whole.unknown(change)
        if unknown is not None and declared is Aggregation.NONE and whole.is_of_moments(change):
            return self._mean_of_states(change, Examples())
        if unknown is not None:
            if declared is not Aggregation.SUM or not only_adds:
                return self._guess(f, change, unknown)
            if not self._grows_as_sums(change):
                self._summed.setdefault(unknown, []).append(change.variable.name)
            return self._sum_of_changes(f, change)
        mean = whole.mean(change)
        return whole.value(change) if mean is None else self._mean_of_states(change, mean.weight)

    def _adds_sums(self, change: StateChange) -> bool:
        kinds = [self._reducer.flows.kind(t) for t in change.in_all.changes]
        is_guessed = self._reducer.step.is_whole and any(isinstance(kind, Sum) and kind.mixed_at for kind in kinds)
        return not is_guessed and all(isinstance(kind, Sum) for kind in kinds)

    def _find_scaled_gradient(self, change: StateChange) -> GradientCall | None:
        """Returns a call with per-replica gradients whose scale affects the written value, or None."""
        step, flows = self._reducer.step, self._reducer.flows
        made = [t for t in (change.in_all.base, *change.in_all.changes) if t and node_of(t) in step.graph_index.nodes]
        needed = reach(map(node_of, made), lambda name: step.graph_index.data[name])
        for call in step.gradient_calls:
            seeds = {call.targets[0]: call.seed} | {term.tensor: term.seed for term in call.terms}
            for weighed, seed in seeds.items():
                is_whole = isinstance(flows.kind(weighed), Sum | PerExample) or flows.kind(seed) != Replicated()
                if seed in needed and not is_whole:
                    return call
        return None

    def _takes_averages(self, change: StateChange, reason: str) -> bool:
        """Treats written values of unknown kind as means over the examples if they do not grow with the batch.

        Keras declares that its metrics are summed. A loss with an unknown dependence on the batch, added to a total,
        would be summed over the replicas, while the step counts it once.
        """
        unknown = self._whole.unknown_parts(change)
        if any(map(self._whole.is_of_written, unknown)):
            return False
        degrees = {t: self._degree.of(t) for t in unknown}
        if not change.variable.dtype.is_floating or 0 not in degrees.values():
            return False
        for name, power in degrees.items():
            self._whole.take_for(name, Sum() if power else Mean(Examples()))
        self._averaged.setdefault(reason, []).append(change.variable.name)
        return True

    def _grows_as_sums(self, change: StateChange) -> bool:
        """Returns True if the added values are known to grow like sums, and contain no loss treated as a mean."""
        unknown = self._whole.unknown_parts(change)
        if any(self._degree.of(t) is None for t in unknown):
            return False
        losses = {node_of(t) for t in self._losses_taken_for_means if self._degree.of(t) != 0}
        made_of = reach(map(node_of, unknown), self._reducer.step.graph_index.data.__getitem__)
        return losses.isdisjoint(made_of)

    @functools.cached_property
    def _losses_taken_for_means(self) -> list[str]:
        step, flows = self._reducer.step, self._reducer.flows
        calls = [step.gradient_calls[k] for k in reduced_calls(step) if not step.gradient_calls[k].terms]
        undecided = [c for c in calls if isinstance(seed_weight(step, flows, c, True), Undecided)]
        return [target for call in undecided for target in call.targets]

    def _warn_of_averages(self) -> None:
        for reason, names in self._averaged.items():
            log.warning(
                "%s: it is not known how the value that the step writes depends on the batch (%s); it is averaged over "
                "the replicas, like a loss of unknown kind.", ", ".join(names), reason, extra=ALIKE_EVERYWHERE,
            )  # fmt: skip
        for reason, names in self._summed.items():
            log.warning(
                "%s: it is not known how the value that the step adds depends on the batch (%s); it is summed over the "
                "replicas, according to the variable's `aggregation`. If one device would add a mean, the sum is too "
                "large by a factor of the number of replicas: use means and sums over the batch in such a metric.",
                ", ".join(names), reason, extra=ALIKE_EVERYWHERE,
            )  # fmt: skip

    def _warn_of_local_values(self) -> None:
        """Warns of variables that replicas write, and read again before the reduction, to compute the loss."""
        step = self._reducer.step
        for write in writes_read_again(step, self._reducer.flows):
            for handle in sorted(step.graph_index.effects[write].writes):
                log.warning(
                    "%s is written before the gradients are computed, from each replica's part of the batch, and read "
                    "again for the loss: each replica continues with the value of its own part, and not with the value "
                    "that one device reads. Write means and sums over the batch to it, outside of branches, in a step "
                    "of ad.function or fit; or rows returned by "
                    "tf.distribute.get_replica_context().all_gather(rows, axis=0); or write it when the gradients are "
                    "applied.",
                    step.by_handle[handle].name, extra=ALIKE_EVERYWHERE,
                )  # fmt: skip

    def _guess(self, f: SubgraphBuilder, change: StateChange, reason: str) -> str:
        variable = change.variable
        if variable.is_overwritten:
            raise _not_known(variable, reason)
        aggregation = variable.aggregation
        if aggregation is Aggregation.NONE:
            aggregation = Aggregation.MEAN if variable.dtype.is_floating else Aggregation.ONLY_FIRST_REPLICA
        log.warning(
            "%s becomes %s: it is not known how the value that the step writes depends on the batch (%s). Compute it "
            "from means and sums over the batch, or from rows returned by "
            "tf.distribute.get_replica_context().all_gather(rows, axis=0); or set the variable's `aggregation`.",
            variable.name, _GUESSES[aggregation], reason, extra=ALIKE_EVERYWHERE,
        )  # fmt: skip
        return self._as_declared(f, change, aggregation)

    def _as_declared(self, f: SubgraphBuilder, change: StateChange, aggregation: Aggregation) -> str:
        if aggregation is Aggregation.MEAN:
            return self._mean_of_states(change, Examples())
        return self._sum_of_changes(f, change) if aggregation is Aggregation.SUM else self._first(f, change)

    def _sum_of_changes(self, f: SubgraphBuilder, change: StateChange) -> str:
        before = f.input(change.before, change.variable.dtype, change.variable.shape)
        if change.only_added is not None:
            added = self._in_replicas(f, change, change.only_added)
        else:
            added = [after - before for after in self._in_replicas(f, change, change.after)]
        local = ordered_sum([self._reducer.kept(f, a, k) for k, a in enumerate(added)])
        result = tf.identity(local)
        self._noted(f, change, local, result)
        return f.name(before + result)

    def _first(self, f: SubgraphBuilder, change: StateChange) -> str:
        after = self._in_replicas(f, change, change.after)
        is_first = self._reducer.context.worker == self._reducer.group.workers[0]
        return self._noted(f, change, after[0] if is_first else tf.zeros_like(after[0]), tf.identity(after[0]))

    def _noted(self, f: SubgraphBuilder, change: StateChange, local: tf.Tensor, result: tf.Tensor) -> str:
        name, level = f"state/{change.label}/joined", self._reducer.level(change.after)
        return self._reducer.noted(f, name, PendingReductionKind.STATE, LocalPart(local), result, level)

    def _mean_of_states(self, change: StateChange, weight: Weight) -> str:
        """Returns the mean of the replicas' values; the old value if all weights are 0."""
        variable, count = change.variable, self._reducer.count

        def mean(before: tf.Tensor, total: tf.Tensor, *rest: tf.Tensor) -> list[tf.Tensor]:
            terms = [tf.math.multiply_no_nan(v, w) for v, w in zip(rest[:count], rest[count:], strict=True)]
            local = ordered_sum(terms)
            return [local, tf.where(total > 0, tf.math.divide_no_nan(local, total), before)]

        weights, total = self._reducer.weights_of(weight, variable.dtype)
        after = [self._reducer.parts.named(change.after, k) for k in range(count)]
        template = self._reducer.template(("mean", variable.dtype), [variable.dtype] * (2 + 2 * count), mean)
        name = f"state/{change.label}/joined"
        local, result = template.splice(self._reducer.editor, name, [change.before, total, *after, *weights])
        self._reducer.note(
            PendingReduction(
                name=name, kind=PendingReductionKind.STATE, local=(local,), result=(result,), weight=total,
                level=self._reducer.level(change.after), dtype=variable.dtype, shape=tf.TensorShape(variable.shape),
                group=self._reducer.group, weight_dtype=variable.dtype,
            )
        )  # fmt: skip
        return result

    def _in_replicas(self, f: SubgraphBuilder, change: StateChange, captured: str) -> list[tf.Tensor]:
        """Returns a captured tensor of a variable's shape for each local replica."""
        dtype, shape = change.variable.dtype, change.variable.shape
        return [f.input(self._reducer.parts.named(captured, k), dtype, shape) for k in range(self._reducer.count)]


def _not_known(variable: Variable, reason: str) -> RewriteError:
    return RewriteError(
        f"{variable.name} is overwritten with a value that each replica computes from its part of the batch (Keras's "
        f"overwrite_with_gradient, as float8 quantization sets it), and the value that one device would write is not "
        f"known ({reason}). Train the model without that quantization, or on one device."
    )
