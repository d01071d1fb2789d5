"""State: what the compute part writes is combined as its variable declares it."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from autodist.graph.fragment import Fragment, fragment
from autodist.graph.item import Aggregation, Join, JoinKind
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.propagation import Examples, Mean, Replicated, Sum, Unknown
from autodist.kernels.joins.joiner import Joiner
from autodist.kernels.state_writes import StateChange
from autodist.kernels.sums import ordered_sum


class StateJoins:
    """Joins what the replicas of one graph leave in variables."""

    def __init__(self, joiner: Joiner) -> None:
        self._joiner = joiner

    def join_state(self, changes: Sequence[StateChange]) -> None:
        """Combines what the compute part writes, as the variable declares it."""
        combined = []
        with fragment(self._joiner.editor, "state") as f:
            for change in changes:
                with tf.name_scope(f"{change.variable.handle}/joined"):
                    combined.append(self._combine(f, change, self._aggregation(change)))
        for change, value in zip(changes, combined, strict=True):
            write = self._joiner.editor[change.write]
            placeholder = node_of(write.input[1])
            self._joiner.editor.set_inputs(change.write, [write.input[0], value, *write.input[2:]])
            self._joiner.editor.remove([placeholder])

    @staticmethod
    def _aggregation(change: StateChange) -> Aggregation:
        variable = change.variable
        if variable.aggregation is not Aggregation.NONE:
            return variable.aggregation
        return Aggregation.MEAN if variable.dtype.is_floating else Aggregation.ONLY_FIRST_REPLICA

    def _combine(self, f: Fragment, change: StateChange, aggregation: Aggregation) -> str:
        variable, is_sum = change.variable, aggregation is Aggregation.SUM
        if is_sum and change.added and not isinstance(self._joiner.flows.kind(change.added), Sum):
            whole = self._added_of_whole(change, change.added)
            if whole is not None:
                return whole
        if aggregation is Aggregation.MEAN:
            return self._mean_of_states(change)
        before = f.input(change.before, variable.dtype, variable.shape)
        after = self._in_replicas(f, change, change.after)
        if is_sum:
            local = self._sum_of_added(f, change, before, after)
            result = tf.identity(local)
        else:
            is_first = self._joiner.context.worker == self._joiner.context.computing[0]
            local = after[0] if is_first else tf.zeros_like(after[0])
            result = tf.identity(after[0])
        name = f"state/{variable.handle}/joined"
        joined = self._joiner.noted(f, name, JoinKind.STATE, local, None, result, self._joiner.level(change.after))
        return f.name(before + result) if is_sum else joined

    def _mean_of_states(self, change: StateChange) -> str:
        """The mean of what the replicas leave, by their numbers of examples; without any the variable stays."""
        variable, count = change.variable, self._joiner.count

        def mean(before: tf.Tensor, total: tf.Tensor, *rest: tf.Tensor) -> list[tf.Tensor]:
            terms = [tf.math.multiply_no_nan(v, w) for v, w in zip(rest[:count], rest[count:], strict=True)]
            local = ordered_sum(terms)
            return [local, tf.where(total > 0, tf.math.divide_no_nan(local, total), before)]

        weights, total = self._joiner.weights_of(Examples(), variable.dtype)
        after = [self._joiner.parts.named(change.after, k) for k in range(count)]
        template = self._joiner.template(("mean", variable.dtype), [variable.dtype] * (2 + 2 * count), mean)
        name = f"state/{variable.handle}/joined"
        local, result = template.splice(self._joiner.editor, name, [change.before, total, *after, *weights])
        self._joiner.note(
            Join(
                name=name, kind=JoinKind.STATE, local=(local,), result=(result,), weight=total,
                level=self._joiner.level(change.after), dtype=variable.dtype, shape=tf.TensorShape(variable.shape),
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
            t: self._joiner.join_value(f"{name}/{k}", JoinKind.STATE, t, self._joiner.flows.kind(t))
            for k, t in enumerate(values)
        }
        clones = self._joiner.editor.clone(arithmetic, f"autodist/{name}/", lambda i: joined.get(tensor(i), i))
        dtype, shape = change.variable.dtype, change.variable.shape
        with fragment(self._joiner.editor, f"{name}/added") as f:
            once = tensor(added).replace(node_of(added), clones[node_of(added)], 1)
            result = f.input(change.before, dtype, shape) + f.input(once, dtype, shape)
        return f.name(result)

    def _means_and_sums_behind(self, name: str) -> tuple[list[str], list[str]] | None:
        """The tensors of known kind that `name` is made from, and the nodes between; None if others are among them."""
        values: dict[str, None] = {}
        between: dict[str, None] = {node_of(name): None}
        front = [node_of(name)]
        while front:
            for i in self._joiner.editor[front.pop()].input:
                source = node_of(i)
                if is_control(i):
                    continue
                if source not in self._joiner.item.wiring.nodes:
                    return None  # a replica's part of an input, or the state itself
                kind = self._joiner.flows.kind(i)
                if isinstance(kind, Replicated):
                    continue
                if isinstance(kind, Mean | Sum):
                    values[tensor(i)] = None
                elif isinstance(kind, Unknown) and self._joiner.item.spec_of(tensor(i)).shape.is_fully_defined():
                    if source not in between:
                        between[source] = None
                        front.append(source)
                else:
                    return None
        return (list(values), list(between)) if values else None

    def _sum_of_added(
        self, f: Fragment, change: StateChange, before: tf.Tensor, after: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        added = [a - before for a in after] if change.added is None else self._in_replicas(f, change, change.added)
        return ordered_sum([self._joiner.kept(f, a, k) for k, a in enumerate(added)])

    def _in_replicas(self, f: Fragment, change: StateChange, captured: str) -> list[tf.Tensor]:
        """A captured tensor of a variable's shape, as each local replica has it."""
        dtype, shape = change.variable.dtype, change.variable.shape
        return [f.input(self._joiner.parts.named(captured, k), dtype, shape) for k in range(self._joiner.count)]
