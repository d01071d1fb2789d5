"""Local steps: each worker updates its own copies of variables, and an outer step averages the changes at times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist.errors import StrategyError
from autodist.graph.names import node_of, tensor
from autodist.graph.parts import OuterStep, PendingReduction, PendingReductionKind, Variable
from autodist.graph.step import EXAMPLES, ReplicatedStep
from autodist.graph.walks import reach
from autodist.kernels.base import Context, Kernel
from autodist.kernels.communicate.bucket_reduction import PersistentBuffer
from autodist.kernels.communicate.buckets import digest
from autodist.kernels.communicate.own_means import use_own_mean
from autodist.kernels.communicate.results import Results
from autodist.kernels.place.copies import add_copy
from autodist.kernels.plan import LOCAL_COPY
from autodist.placement.holder import Copy, Holder
from autodist.placement.synchrony import SyncMode
from autodist.synchronizers import LocalSteps

_EXACT = tf.float64
"""The dtype in which examples are counted and averages are divided."""


@dataclass(frozen=True)
class AverageLocalSteps(Kernel[ReplicatedStep, ReplicatedStep]):
    """Makes steps train a copy on each worker, and adds the outer steps that average the changes of the copies.

    A worker's copy begins with the value of the variable. Each step updates it from the worker's own examples, and
    sends nothing. The outer step takes the mean change of all copies, weighted by the examples since the last one, as a
    gradient, and applies it to the variable with Nesterov's momentum (DiLoCo, Douillard et al., arXiv 2311.08105;
    with a learning rate of 1 and no momentum it is federated averaging, McMahan et al., AISTATS 2017). The copies then
    begin with the new value. Slots stay those of each worker. Moving averages, such as those of batch normalisation,
    are averaged, too.

        read(v) → f → g0 + g1 → update(v)     becomes     read(copy) → f → g → update(copy);
        every n steps:    copy - v, of all workers → mean → outer update(v) → v → assign(copy)

    Between outer steps, the variable has the same value on all workers: what the script reads, evaluates and saves.
    """

    name: ClassVar[str] = "average-local-steps"
    after: ClassVar[Mapping[str, str]] = {
        "set-sync-mode": "it finds the slots of variables with local steps",
    }

    def apply(self, step: ReplicatedStep, context: Context) -> ReplicatedStep:
        if context.workers == 1 or context.goes_through_stages(step):
            return step
        step = replace(step, holders=_with_copies(step, context))
        copied = [v for v in step.variables if _has_copy(step, v)]
        if not copied:
            return step
        work = _LocalSteps(step, context, copied)
        if not step.gradients:
            return work.refresh_after_writes()
        return work.run()


def _with_copies(step: ReplicatedStep, context: Context) -> dict[str, Holder]:
    """Returns the holders of the step, and of the variables with local steps."""
    local, everyone = context.plan.local_steps, context.placement.all_workers
    whole = {
        name: Holder.whole(step.by_name[name].shape, everyone)
        for name in local if name in step.by_name and name not in step.slices
    }  # fmt: skip
    copies = dict.fromkeys(local, (Copy(LOCAL_COPY),))
    return {name: holder.with_copies(name, copies) for name, holder in (whole | {**step.holders}).items()}


def _has_copy(step: ReplicatedStep, variable: Variable) -> bool:
    return variable.name in step.slices and step.slices[variable.name].copy(LOCAL_COPY) is not None


class _LocalSteps:
    """Implements one `AverageLocalSteps.apply`; the methods are in the order of `run`."""

    def __init__(self, step: ReplicatedStep, context: Context, copied: Sequence[Variable]) -> None:
        self.step, self.context = step, context
        self.results = Results(step)
        self.editor = self.results.editor
        self.copies = {v.name: self._add_copy(v) for v in copied}
        self.local = context.plan.local_steps

    def run(self) -> ReplicatedStep:
        own = [pending for pending in self.step.reductions if pending.variable in self.local]
        for pending in own:
            use_own_mean(self.results, pending)
        for name, copy in self.copies.items():
            self.editor.rewire(tensor(self.step.by_name[name].handle), tensor(copy))
        trained = dict.fromkeys(pending.variable for pending in own if pending.variable is not None)
        means = self._means()
        outer: list[PendingReduction] = []
        for local in dict.fromkeys(self.local[name] for name in trained):
            names = [name for name in trained if self.local[name] == local]
            outer += self._add_outer_step(local, names, means)
            means = []
        slots = [v for v in self.step.variables if self._is_slot(v)]
        self._keep([*self.copies.values(), *(v.handle for v in slots)])
        left = [pending for pending in self.step.reductions if pending.variable not in self.local]
        return self.editor.to_step(reductions=(*left, *outer))

    def refresh_after_writes(self) -> ReplicatedStep:
        """Makes a step that trains nothing, but writes variables, assign the new values to their copies.

        Raises:
            StrategyError: a new value is computed from another variable that may differ between workers.
        """
        effects = self.step.graph_index.effects
        for name, copy in self.copies.items():
            variable = self.step.by_name[name]
            writes = [node for node, effect in effects.items() if variable.handle in effect.writes]
            if writes:
                self._require_alike(variable, writes)
                with self.editor.subgraph(f"refresh/{copy}") as f:
                    with tf.control_dependencies([f.after(writes)]):
                        value = _read(f.input(variable.handle, tf.resource), variable)
                    done = tf.raw_ops.AssignVariableOp(resource=f.input(copy, tf.resource), value=value)
                self.editor.run([f.name(done)])
        return self.editor.to_step()

    def _require_alike(self, variable: Variable, writes: Sequence[str]) -> None:
        """Checks that no other variable of the same shape, such as summed gradients, goes into the new value."""
        index = self.step.graph_index
        read = {h for name in reach(writes, index.data.__getitem__) for h in _reads(self.step, name)}
        for other in self.step.variables:
            if other.handle in read and other.shape == variable.shape and other.name not in self.copies:
                raise StrategyError(
                    f"{variable.name} makes local steps, and a step without gradients computes its new value from "
                    f"{other.name}, which each worker has updated from its own examples. Compute the gradients in the "
                    "step that applies them, or use AllReduce without local steps."
                )

    def _add_copy(self, variable: Variable) -> str:
        return add_copy(self.editor, variable, f"autodist/local_copy/{variable.handle}", LOCAL_COPY)

    def _is_slot(self, variable: Variable) -> bool:
        synchrony = self.step.synchrony_of.get(variable.name)
        return synchrony is not None and synchrony.mode is SyncMode.LOCAL and variable.name not in self.copies

    def _means(self) -> list[Variable]:
        """Returns the variables to which the compute part writes means over this worker's examples."""
        means = {
            pending.result[0] for pending in self.step.own_state
            if pending.kind is PendingReductionKind.STATE and pending.weight is not None
        }  # fmt: skip
        written = [
            node.input[0] for node in self.step.graph_index.of_op("AssignVariableOp") if tensor(node.input[1]) in means
        ]
        return [self.step.by_handle[handle] for handle in dict.fromkeys(written) if handle in self.step.by_handle]

    # -- the outer step --------------------------------------------------------------------------------------------

    def _add_outer_step(
        self, local: LocalSteps, names: Iterable[str], means: Iterable[Variable]
    ) -> list[PendingReduction]:
        """Adds the outer step of some variables; returns the reductions of their mean changes.

        Variables that an outer step of an earlier program averages are left to that one, since a second one would apply
        the momentum again. It counts the examples of this step, too.
        """
        earlier = self.context.outer_steps
        trained = [self.step.by_name[name] for name in names]
        for key in dict.fromkeys(earlier[name] for name in map(self._stored_as, trained) if name in earlier):
            self._count_examples(key, is_own=False)
        trained, means = ([v for v in some if self._stored_as(v) not in earlier] for some in (trained, means))
        if not (trained or means):
            return []
        averaged = tuple(map(self._stored_as, [*trained, *means]))
        key = digest(f"{local} {';'.join(averaged)}")
        self.editor.add_outer_step(key, OuterStep(local.steps, variables=averaged))
        weight = self._count_examples(key)
        made = [self._reduce(key, v, weight) for v in trained]
        for variable, pending in zip(trained, made, strict=True):
            self._update(key, local, variable, pending.result[0])
        for variable in means:
            made.append(self._reduce(key, variable, weight))
            with self.editor.subgraph(f"outer/{key}/mean/{variable.name}") as f:
                value = f.input(made[-1].result[0], variable.dtype, variable.shape)
                done = tf.raw_ops.AssignVariableOp(resource=f.input(variable.handle, tf.resource), value=value)
            self.editor.run([f.name(done)], key)
            self._keep([variable.handle])
        return made

    def _count_examples(self, key: str, is_own: bool = True) -> str:
        """Counts this worker's examples since the last outer step; returns the tensor with their number.

        Args:
            key: of the outer step.
            is_own: True if it is one of this step, and resets the number.
        """
        with self.editor.subgraph(f"outer/{key}/examples") as f:
            counted = PersistentBuffer.make(f"local_steps/{key}/examples", tf.zeros([], _EXACT))
            if node_of(EXAMPLES) in self.editor:
                own = tf.cast(f.input(EXAMPLES, tf.int64, []), _EXACT)
            else:  # no batch: each replica counts as one example
                own = tf.constant(len(self.context.local_replicas), _EXACT)
            add = counted.add(own)
            with tf.control_dependencies([counted.value]):
                reset = counted.write(tf.zeros([], _EXACT))
        self.editor.initialize({counted.name: f.name(counted.initializer)})
        if self.context.computes:
            self.editor.run([f.name(add)])
        if is_own:
            self.editor.run([f.name(reset)], key)
        return f.name(counted.value)

    def _reduce(self, key: str, variable: Variable, weight: str) -> PendingReduction:
        """Returns the pending mean of a variable's change on all workers, or of its value if it has no copy."""
        copy = self.copies.get(variable.name)
        with self.editor.subgraph(f"outer/{key}/part/{variable.name}") as f:
            own = value = _read(f.input(variable.handle, tf.resource), variable)
            if copy is not None:
                own = _read(f.input(copy, tf.resource), variable) - value
            weighted = own * tf.cast(f.input(weight, _EXACT, []), variable.dtype)
            result = tf.identity(weighted)
        return PendingReduction(
            name=f"{variable.name}/outer/{key}",
            kind=PendingReductionKind.STATE if copy is None else PendingReductionKind.GRADIENT,
            local=(f.name(weighted),),
            result=(f.name(result),),
            weight=weight,
            level=1,
            dtype=variable.dtype,
            shape=tf.TensorShape(variable.shape),
            group=self.context.group,
            variable=None if copy is None else variable.name,
            weight_dtype=_EXACT,
            outer=key,
        )

    def _update(self, key: str, local: LocalSteps, variable: Variable, change: str) -> None:
        """Applies the mean change to a variable by Nesterov's momentum, as PyTorch's SGD does, and to its copy."""
        initializers: dict[str, str] = {}
        with self.editor.subgraph(f"outer/{key}/update/{variable.name}") as f:
            handle = f.input(variable.handle, tf.resource)
            mean = f.input(change, variable.dtype, variable.shape)
            writes = []
            if local.outer_momentum:
                buffer = f"local_steps/{digest(self._stored_as(variable))}/momentum"
                velocity = PersistentBuffer.make(buffer, tf.zeros(variable.shape, variable.dtype))
                fresh = local.outer_momentum * velocity.value + mean
                writes.append(velocity.write(fresh))
                mean += local.outer_momentum * fresh
                initializers[buffer] = f.name(velocity.initializer)
            value = _read(handle, variable) + local.outer_learning_rate * mean
            for written in (handle, f.input(self.copies[variable.name], tf.resource)):
                writes.append(tf.raw_ops.AssignVariableOp(resource=written, value=value))
        self.editor.initialize(initializers)
        self.editor.run(map(f.name, writes), key)

    # -- state -----------------------------------------------------------------------------------------------------

    def _keep(self, handles: Iterable[str]) -> None:
        """Makes checkpoints save the values that this worker has, which differ from those of other workers."""
        self.editor.initialize({f"kept/{self._session_name(handle)}": handle for handle in handles})

    def _stored_as(self, variable: Variable) -> str:
        return self._session_name(variable.handle)

    def _session_name(self, handle: str) -> str:
        return self.editor[handle].attr["shared_name"].s.decode()


def _reads(step: ReplicatedStep, name: str) -> frozenset[str]:
    effect = step.graph_index.effects.get(name)
    return frozenset() if effect is None else effect.reads


def _read(handle: tf.Tensor, variable: Variable) -> tf.Tensor:
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype)
    value.set_shape(variable.shape)
    return value
