"""Session runs that only set variables (initializers, assignment of a learning rate): the chief's values are used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist.compressors.values import ValueCode
from autodist.graph.effects import group_by_handle
from autodist.graph.names import node_of
from autodist.graph.parts import Variable
from autodist.graph.step import CapturedStep, PlacedStep, Step
from autodist.graph.step_editor import StepEditor
from autodist.graph.subgraph import subgraph
from autodist.graph.walks import reach
from autodist.kernels.base import Context, Kernel
from autodist.placement.holder import Copy, Slice


@dataclass(frozen=True)
class SetByChief(Kernel[PlacedStep, PlacedStep]):
    """Copies the values that the chief writes to the other workers, which then run the step without its writes.

    chief:  v.assign(f())   becomes   v.assign(f()), and v.assign(v) on every other worker, proxies included
    others: v.assign(f())   becomes   nothing
    """

    name: ClassVar[str] = "set-by-chief"

    def apply(self, step: PlacedStep, context: Context) -> PlacedStep:
        if context.workers == 1:
            return step
        writes = {name: effect.writes for name, effect in step.graph_index.effects.items() if effect.writes}
        return (
            self._write_everywhere(step, context, writes)
            if context.worker == 0
            else self._remove_writes(step, list(writes))
        )

    @staticmethod
    def _write_everywhere(step: PlacedStep, context: Context, writes: dict[str, frozenset[str]]) -> PlacedStep:
        editor = StepEditor(step)
        by_handle = group_by_handle(writes.items())
        for handle, names in by_handle.items():
            variable = step.by_handle[handle]
            if variable.name not in step.owners:
                _write_copies(editor, variable, names, range(1, context.workers), context)
            else:
                owner, *others = step.slices[variable.name].group.workers
                for name in (handle, *editor.consumers(handle)):
                    editor[name].device = context.home(owner, variable.dtype, step.slices[variable.name].device(owner))
                if others:
                    _write_copies(editor, variable, names, others, context, of=step.slices[variable.name])
            for copy in context.plan.copies.get(variable.name, ()):
                holding = [w for w in range(context.workers) if copy.is_held_by(w, step.owners.get(variable.name))]
                _write_copies(editor, variable, names, holding, context, copy)
        # Written variables are placed here; variables that are only read are placed by a later kernel.
        everyone = dict.fromkeys((step.by_handle[handle].name for handle in by_handle), context.placement.all_workers)
        holders = {name: holder.with_groups(name, everyone) for name, holder in step.holders.items()}
        return editor.to_step(holders={name: one for name, one in holders.items() if not one.is_everywhere})

    @staticmethod
    def _remove_writes(step: PlacedStep, writes: list[str]) -> PlacedStep:
        editor = StepEditor(step)
        for name in writes:
            editor.replace_control(name, [])
        editor.remove(writes)
        return editor.to_step()


_ITSELF = Copy("")
"""The variable under its own name."""


def _write_copies(
    editor: StepEditor[Step],
    variable: Variable,
    after: list[str],
    workers: Iterable[int],
    context: Context,
    copy: Copy = _ITSELF,
    of: Slice | None = None,
) -> None:
    """Assigns the value of a variable after the writes `after` to its copies on `workers`."""
    handle = variable.handle
    shared_name = editor[handle].attr["shared_name"].s.decode() + copy.suffix
    made = []
    with (
        subgraph(editor, f"set_on_{'all_workers' if of is None else 'owners'}/{handle}{copy.suffix}") as f,
        tf.control_dependencies([f.after(after)]),
    ):
        value = tf.raw_ops.ReadVariableOp(resource=f.input(handle, tf.resource), dtype=variable.dtype)
        value = ValueCode.of(copy.encoding, variable.shape, variable.dtype).rounded(value)
        for worker in workers:
            with tf.device(context.home(worker, variable.dtype, None if of is None else of.device(worker))):
                there = tf.raw_ops.VarHandleOp(dtype=variable.dtype, shape=variable.shape, shared_name=shared_name)
                made.append(f.name(tf.raw_ops.AssignVariableOp(resource=there, value=value)))
    editor.run(made)


def only_sets(step: CapturedStep) -> bool:
    """Returns True if a run writes variables with values that are equal on all replicas, and trains nothing."""
    if step.gradients:
        return False
    writes = [name for name, effect in step.graph_index.effects.items() if effect.writes]
    if not writes:
        return False
    needed = reach(writes, step.graph_index.data.__getitem__)
    return needed.isdisjoint(map(node_of, step.batch_axes))
