"""Reads the variables that another worker owns once per step, and writes them on that worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from autodist.graph.editor import GraphEditor
from autodist.graph.effects import QUERIES, READS
from autodist.graph.names import data_inputs, is_control, node_of, tensor
from autodist.graph.parts import Variable
from autodist.graph.step import Step, StepWithOwners
from autodist.graph.step_editor import StepEditor
from autodist.kernels.base import Context, Kernel
from autodist.kernels.place.copies import add_copy, read_before, take_copy

W = TypeVar("W", bound=StepWithOwners)


@dataclass(frozen=True)
class ReadRemoteVariables(Kernel[StepWithOwners, StepWithOwners]):
    """Places handles, reads and writes of remote variables at their owners.

    Reads of one variable with the same control inputs are merged. A node that takes the handle itself (a loop, which
    would read remotely in every iteration) gets a copy's handle. The copy is on this worker and is refreshed once per
    step. A node that writes a remote variable may also take the handle of a variable elsewhere (an `If` around an
    update). It gets the handle of a copy at the owner.
    """

    name: ClassVar[str] = "read-remote-variables"
    after: ClassVar[Mapping[str, str]] = {
        "parameter-servers": "it moves updates to the owners",
    }

    def apply(self, step: W, context: Context) -> W:
        owned = [v for v in step.variables if v.name in step.owners]
        far = {v.handle: context.nearest_holder(step.slices[v.name].group) for v in owned}
        far = {handle: owner for handle, owner in far.items() if owner != context.worker}
        if context.workers == 1 or not far:
            return step
        editor = StepEditor(step)
        _read_far(editor, step, context, far)
        return editor.to_step()


def _read_far(editor: GraphEditor, step: StepWithOwners, context: Context, far: Mapping[str, int]) -> None:
    written = {name: effect.writes for name, effect in step.graph_index.effects.items()}
    for handle, worker in far.items():
        if handle not in editor:
            continue
        _merge_reads(editor, handle)
        takers = [name for name in sorted(editor.consumers(handle)) if editor[name].op not in READS | QUERIES]
        _give_copy(
            editor, step.by_handle[handle], context, worker, context.worker,
            [name for name in takers if not written.get(name)],
        )  # fmt: skip
        variable = step.by_handle[handle]
        device = context.home(worker, variable.dtype, step.slices[variable.name].device(worker))
        editor[handle].device = device
        for name in editor.consumers(handle):
            editor[name].device = device
    for name, handles in written.items():
        if name in editor and any(h in far for h in handles):
            _use_copies(editor, step, context, far, name, next(far[h] for h in handles if h in far))


def _use_copies(
    editor: GraphEditor, step: Step, context: Context, far: Mapping[str, int], writer: str, worker: int
) -> None:
    """Makes a node that writes at `worker` use copies there of the variables that lie elsewhere."""
    taken = set(map(node_of, data_inputs(editor[writer]))) & step.by_handle.keys()
    for handle in sorted(taken):
        if far.get(handle, context.worker) != worker:
            _give_copy(editor, step.by_handle[handle], context, far.get(handle, context.worker), worker, [writer])


def _merge_reads(editor: GraphEditor, handle: str) -> None:
    first: dict[tuple[str, ...], str] = {}
    for name in sorted(editor.consumers(handle)):
        node = editor[name]
        if node.op != "ReadVariableOp":
            continue
        merged = first.setdefault(tuple(sorted(filter(is_control, node.input))), name)
        if merged != name:
            editor.rewire(tensor(name), tensor(merged))
            editor.replace_control(name, [merged])
            editor.remove([name])


def _give_copy(
    editor: GraphEditor, variable: Variable, context: Context, holder: int, reader: int, takers: list[str]
) -> None:
    """Makes nodes `takers` on worker `reader` use a copy of a variable that worker `holder` has."""
    if not takers:
        return
    name = f"autodist/copy/{reader}/{variable.handle}"
    if name not in editor:
        add_copy(editor, variable, name, f"/copy_for_{context.worker}", context.home(reader, variable.dtype))
    for taker in takers:
        value = read_before(editor, taker, variable, f"{name}/{taker}", context.home(holder, variable.dtype))
        take_copy(editor, [taker], [tensor(variable.handle)], name, value)
