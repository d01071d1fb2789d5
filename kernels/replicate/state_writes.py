"""Replaces writes in the compute part (batch-norm averages, metrics) by values that are combined over replicas."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import tensorflow as tf

from autodist.errors import RewriteError
from autodist.graph.control_flow import find_in_branches
from autodist.graph.editor import GraphEditor, NodeDef
from autodist.graph.effects import group_by_handle
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.op_types import is_in_batches
from autodist.graph.ops import SUMS, Trait, having, writes_rows
from autodist.graph.parts import Variable
from autodist.graph.stages import Stages
from autodist.graph.step import PlacedStep
from autodist.graph.step_editor import StepEditor
from autodist.graph.walks import reach
from autodist.kernels.place.copies import add_copy, take_copy

_ARITHMETIC = {s.assign: s.arithmetic for s in SUMS}


@dataclass(frozen=True)
class Made:
    """The composition of a variable's value after some writes of the step.

    Attributes:
        base: captured tensor that was assigned last; None if additions start from the value before the step.
        added: captured tensors that were added since.
        subtracted: captured tensors that were subtracted since.
    """

    base: str | None
    added: tuple[str, ...] = ()
    subtracted: tuple[str, ...] = ()

    @property
    def changes(self) -> tuple[str, ...]:
        """The tensors that were added or subtracted."""
        return self.added + self.subtracted


@dataclass(frozen=True)
class StateChange:
    """The change that the compute part makes to one variable in a step.

    Attributes:
        variable: the variable that it writes.
        before: tensor with the value before the step.
        after: tensor with the value that a replica computes.
        made: by captured write, in order, the composition of the value after it.
        write: the node that writes the combined value; its value input is set later.
        label: used in node names.
        copies: variables that hold this replica's value for ops that take a handle: branches, loops, functions, and
            gathers in batches.
        added: the nodes of these copies.
    """

    variable: Variable
    before: str
    after: str
    made: Mapping[str, Made]
    write: str
    label: str
    copies: tuple[Variable, ...] = ()
    added: frozenset[str] = frozenset()

    @property
    def in_all(self) -> Made:
        """The composition of the value that a replica computes."""
        return self.made[node_of(self.after)]

    @property
    def only_added(self) -> str | None:
        """The tensor that was added, if that is the only change; exact, while `after - before` would be rounded."""
        made = self.in_all
        return made.added[0] if made.base is None and len(made.added) == 1 and not made.subtracted else None


def take_state_writes(
    editor: StepEditor[PlacedStep], step: PlacedStep, stages: Stages, replica_dependent: Collection[str]
) -> list[StateChange]:
    """Replaces writes of replica-dependent values in the compute part by arithmetic and a single write per variable.

        v.assign(f(v, x)); y = g(v)      becomes      v1 = f(v, x); y = g(v1); and once, at the end, v.assign(combined)

    A part of the step that runs once may lie between two writes (a metric's result, an update that reads an average).
    The writes before it are then combined first, and those after it start from the combined value.

    Replica-independent writes are replaced as well if they write a trained variable that one worker owns and that is
    used after them: the owner writes once all gradients have arrived, and the gradients cannot wait for that.

    Raises:
        RewriteError: such a write is of a kind that cannot be combined.
    """
    by_handle = group_by_handle((write, stages.effects[write].writes) for write in stages.state_writes)
    owned = {step.by_name[g.variable].handle for g in stages.gradients if g.variable in step.owners}
    changes: list[StateChange] = []
    for handle, writes in by_handle.items():
        is_waited_for = handle in owned and stages.is_used_after(handle, writes)
        differs = any(w in replica_dependent for w in writes)
        if is_waited_for or differs:
            for k, some in enumerate(_runs_of(step, stages, handle, writes)):
                run = _Run(
                    tuple(some), tuple(writes), f"{handle}/{k}" if k else handle, changes[-1].write if k else None
                )
                variable = step.by_handle[handle]
                _require_assignments(editor, variable, run.writes, differs)
                changes.append(_take(editor, step, stages, variable, run))
    return changes


@dataclass(frozen=True)
class _Run:
    """Writes of a variable that are combined into one.

    Attributes:
        writes: their names.
        every: all writes of the variable, in order.
        label: used in node names.
        after: the write that combines the previous run; None for the first.
    """

    writes: tuple[str, ...]
    every: tuple[str, ...]
    label: str
    after: str | None


def _runs_of(step: PlacedStep, stages: Stages, handle: str, writes: Sequence[str]) -> Iterator[list[str]]:
    """Groups the writes of a variable into runs: no write waits for a run-once node after another write of its run."""
    run: list[str] = []
    for write in writes:
        behind = {c for earlier in run for c in step.graph_index.consumers[earlier] if c in stages.once}
        behind |= {
            u
            for u in _updates_before(stages, write, handle)
            if not set(run).isdisjoint(stages.writes_before(u, handle))
        }
        needed: set[str] = reach([write], step.graph_index.sources.__getitem__) if behind else set()
        if not behind.isdisjoint(needed):
            yield run
            run = []
        run.append(write)
    yield run


def _updates_before(stages: Stages, name: str, handle: str) -> list[str]:
    """Returns the run-once writes of a variable, such as an optimizer's update, that are ordered before a node."""
    return [write for write in stages.writes_before(name, handle) if write in stages.once]


_OUT_OF_THE_BRANCH = (
    "Return the new value from tf.switch_case, the old one if nothing changes, and assign it; or use tf.cond."
)
_OUT_OF_THE_LOOP = "Use a loop of Python (range in place of tf.range), or call the step once for each iteration."
_BY_ONE_OF_THESE = "Write the whole variable by one of these."
_BY_WHOLE = "Write the whole variable by assign, with tf.tensor_scatter_nd_update for single rows."
_BY_GATHERED_ROWS = (
    "Write rows and places of the whole batch, from tensors that "
    "tf.distribute.get_replica_context().all_gather(rows, axis=0) returns."
)
_IN_PLACE_OF = {"Case": _OUT_OF_THE_BRANCH, **dict.fromkeys(having(Trait.LOOP), _OUT_OF_THE_LOOP)}


def _require_assignments(editor: GraphEditor, variable: Variable, writes: Sequence[str], differs: bool) -> None:
    """Checks that writes can be combined.

    Args:
        editor: the editor of the graph.
        variable: the variable.
        writes: their nodes.
        differs: True if the replicas write different values; False if the variable has an owner, and is used after it
            was written.

    Raises:
        RewriteError: a write is none of `assign`, `assign_add` and `assign_sub`.
    """
    reason = (
        "with values that differ between replicas" if differs else "before the step uses it, and one worker owns it"
    )
    by_rows = _BY_GATHERED_ROWS if differs else _BY_WHOLE
    for write in writes:
        op = editor[write].op
        if op not in ("AssignVariableOp", *_ARITHMETIC):
            raise RewriteError(
                f"the step writes {variable.name} by {op} ({write}) outside any optimizer's update, {reason}; only "
                "assign, assign_add and assign_sub can be combined. "
                + _IN_PLACE_OF.get(op, by_rows if writes_rows(op) else _BY_ONE_OF_THESE)
            )


def _take(
    editor: StepEditor[PlacedStep], step: PlacedStep, stages: Stages, variable: Variable, run: _Run
) -> StateChange:
    handle, writes = variable.handle, run.writes
    before = _read(editor, variable, run, _updates_before(stages, writes[0], handle))
    write = _write(editor, variable, run.label, [i for w in writes for i in editor[w].input if is_control(i)])
    made = _made(editor, step, stages, variable, run)
    _require_reads_that_run(step, stages, variable, set(writes))
    copies = _reads_become_values(editor, stages, variable, run, write)
    added = frozenset(node for nodes in copies.values() for node in nodes)
    for w in writes:
        earlier = [e for e in stages.writes_before(w, handle) if e in writes and e != w]
        _become_value(editor, editor[w], tensor(max(earlier, key=stages.order.__getitem__)) if earlier else before)
        outside = [c for c in editor.consumers(w) if c in stages.once or c == write]
        editor.replace_control(w, [write], outside)
    return StateChange(variable, before, tensor(writes[-1]), made, write, run.label, tuple(copies), added)


def _require_reads_that_run(step: PlacedStep, stages: Stages, variable: Variable, writes: set[str]) -> None:
    """Checks that the single write can wait for all reads before it.

    Raises:
        RewriteError: a read is in a TensorFlow 1 branch. If the branch does not run, nor do nodes that wait for it.
    """
    branched = set(find_in_branches(step.graph_index))
    for name in stages.readers(variable.handle):
        if name in branched and name not in writes and writes.isdisjoint(stages.writes_before(name, variable.handle)):
            raise RewriteError(
                f"the step writes {variable.name} outside any optimizer's update and reads it ({name}) in a branch of "
                "TensorFlow 1's control flow, for which the write cannot wait. Build the graph in ad.scope(), where "
                "branches are TensorFlow 2's, or call tf.compat.v1.enable_control_flow_v2() before it is built."
            )


def _read(editor: GraphEditor, variable: Variable, run: _Run, updates: Sequence[str]) -> str:
    inputs = [variable.handle, *([f"^{run.after}"] if run.after else ()), *(f"^{update}" for update in updates)]
    return tensor(editor.add_op("ReadVariableOp", f"autodist/state/{run.label}/before", inputs, variable.dtype))


def _write(editor: GraphEditor, variable: Variable, label: str, control: list[str]) -> str:
    """Adds the single write; its value is a placeholder until the combined value is known."""
    value = editor.add_op("Placeholder", f"autodist/state/{label}/combined", (), variable.dtype)
    read = f"^autodist/state/{label}/before"
    inputs = [variable.handle, value, *dict.fromkeys([*control, read])]
    return editor.add_op("AssignVariableOp", f"autodist/state/{label}/write", inputs, variable.dtype)


def _made(editor: GraphEditor, step: PlacedStep, stages: Stages, variable: Variable, run: _Run) -> dict[str, Made]:
    found = {}
    made = Made(None)
    for write in run.writes:
        value = tensor(editor[write].input[1])
        addend = _addend(editor, step, stages, variable, run.every[: run.every.index(write)], write)
        if addend is not None:
            made = replace(made, added=(*made.added, addend))
        elif editor[write].op == "AssignSubVariableOp":
            made = replace(made, subtracted=(*made.subtracted, value))
        else:
            made = Made(value)
        found[write] = made
    return found


def _addend(
    editor: GraphEditor, step: PlacedStep, stages: Stages, variable: Variable, earlier: Sequence[str], write: str
) -> str | None:
    """Returns the tensor that a write adds to the value after the earlier ones; None if it does not add."""
    node = editor[write]
    if node.op == "AssignAddVariableOp":
        return tensor(node.input[1])
    value = editor[node_of(node.input[1])]
    if node.op != "AssignVariableOp" or value.op not in having(Trait.ADDITION):
        return None
    for first, second in ((0, 1), (1, 0)):
        source = editor[node_of(value.input[first])]
        if source.op == "ReadVariableOp" and node_of(source.input[0]) == variable.handle:
            added = tensor(value.input[second])
            written = {*earlier, *_updates_before(stages, write, variable.handle)}
            is_current = written <= set(stages.writes_before(source.name, variable.handle))
            return added if is_current and step.spec_of(added).shape == tf.TensorShape(variable.shape) else None
    return None


def _reads_become_values(
    editor: StepEditor[PlacedStep], stages: Stages, variable: Variable, run: _Run, final: str
) -> dict[Variable, list[str]]:
    """Gives the reads after each write of a run its value; returns the copies that hold it, with their nodes."""
    copies: dict[Variable, list[str]] = {}
    for name in stages.readers(variable.handle):
        if name in run.every or name in stages.once or name not in editor:
            continue
        earlier = stages.writes_before(name, variable.handle)
        node = editor[name]
        if set(earlier).isdisjoint(run.every):
            editor.add_control(final, [name])
            continue
        current = max(earlier, key=stages.order.__getitem__)
        if current not in run.writes:
            continue  # it reads the value after another run of writes, or after an update
        if node.op == "ResourceGather" and not is_in_batches(node):
            _become_gather(editor, node, current)
        elif node.op == "ReadVariableOp":
            editor.pass_on(name, tensor(current), tf.as_dtype(node.attr["dtype"].type))
        else:
            copy, nodes = _take_value(editor, variable, name, current)
            copies[copy] = nodes
    return copies


def _take_value(
    editor: StepEditor[PlacedStep], variable: Variable, name: str, current: str
) -> tuple[Variable, list[str]]:
    """Makes an op that takes a handle read the value after a write, from a copy; returns the copy and its nodes."""
    suffix = f"/written_before/{name}"
    copy = replace(variable, name=f"{variable.name}{suffix}", handle=f"{variable.handle}{suffix}", trainable=False)
    add_copy(editor, variable, copy.handle, suffix)
    value = editor.add_op("Identity", f"{copy.handle}/value", [current], variable.dtype)
    editor.note({tensor(value): tf.TensorSpec(variable.shape, variable.dtype)})
    refresh = take_copy(editor, [name], [tensor(variable.handle)], copy.handle, value)
    return copy, [copy.handle, value, *refresh]


def _become_gather(editor: GraphEditor, node: NodeDef, current: str) -> None:
    """Makes a gather read rows of the value after a write, in place of the variable's."""
    dtype, index_dtype = node.attr["dtype"].type, node.attr["Tindices"].type
    ids = node.input[1]
    axis = NodeDef(name=f"autodist/state/{node.name}/axis", op="Const", device=node.device)
    axis.attr["dtype"].type = tf.int32.as_datatype_enum
    axis.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(0, tf.int32))
    editor.add(axis)
    node.op = "GatherV2"
    node.attr.clear()
    for name, of in (("Tparams", dtype), ("Tindices", index_dtype), ("Taxis", tf.int32.as_datatype_enum)):
        node.attr[name].type = of
    editor.set_inputs(node.name, [tensor(current), ids, axis.name])


def _become_value(editor: GraphEditor, node: NodeDef, current: str) -> None:
    dtype = node.attr["dtype"].type
    value = node.input[1]
    arithmetic = _ARITHMETIC.get(node.op)
    node.op = arithmetic or "Identity"
    node.attr.clear()
    node.attr["T"].type = dtype
    editor.set_inputs(node.name, [current, value] if arithmetic else [value])
