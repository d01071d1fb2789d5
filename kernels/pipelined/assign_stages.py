"""Assign stages: which pipeline stage each node of the compute part belongs to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autodist.graph.names import is_control, node_of
from autodist.graph.pipeline_assignment import Assignment
from autodist.graph.pipeline_part import PipelinePart
from autodist.graph.step import Step
from autodist.graph.step_editor import StepEditor
from autodist.graph.waiting import free_constants, wait_past
from autodist.kernels.base import Context, Kernel
from autodist.options.fields import OptionError


@dataclass(frozen=True)
class AssignStages(Kernel):
    """Notes by which pipeline stage each node of the compute part is computed.

    What goes forward belongs to the latest stage among those of its inputs and of the variables that it reads. What
    the seed of the loss reaches belongs to the earliest among those of its inputs, where a variable counts as lying
    where it was used before; what a later variable's gradient alone is made of, to that variable's. What a batch alone
    leads to is left open: it is computed where it is read. What the script has made in a stage (`ad.stage`) goes
    forward there.
    """

    name: ClassVar[str] = "assign-stages"

    def apply(self, item: Step, context: Context) -> Step:
        if not context.goes_through_stages(item):
            return item
        _require_apart(item)
        item = _without_shared_waits(item)
        assignment = Assignment(item, stage_of_handles(item, context), len(context.plan.stages))
        found = assignment.run()
        freed = _without_waits_for_others(item, found, assignment.stages.once)
        return replace(_in_order_of_shared_state(freed, assignment.shared_before), pipeline_parts=found)


def _require_apart(item: Step) -> None:
    """Passes if no micro-batch waits for what others make before it is computed to its end.

    Raises:
        StrategyError: one does, and those after it begin when it has ended.
    """
    if item.whole_sums:
        raise OptionError(
            "builder",
            f"the step adds up or gathers over all examples while it computes ({item.whole_sums[0].node}), as "
            "synchronized batch normalisation, all_gather and losses of deviations from a mean of the batch do, and "
            "the micro-batches of a pipeline come one after the other. Set synchronized=False, gather nothing and "
            "normalise by keras.layers.BatchNormalization, or take a strategy without pipeline stages.",
        )


def _without_shared_waits(item: Step) -> Step:
    """The step in which a micro-batch waits for no other by way of what they share.

    Constants, and operations that do nothing but wait, are the same for all micro-batches: they would wait for all of
    them.
    """
    editor = StepEditor(item)
    roots = {*map(node_of, item.outputs), *item.targets}
    freed = free_constants(editor, item.graph_index, roots)
    idle = {
        node.name for node in item.graph_index.of_op("NoOp")
        if node.name not in roots and item.graph_index.consumers[node.name] and item.graph_index.sources[node.name]
    }  # fmt: skip
    if idle:
        wait_past(editor, set(editor.names) - idle)
        editor.remove(idle)
    return editor.to_item() if freed or idle else item


def _without_waits_for_others(item: Step, parts: Mapping[str, PipelinePart], once: Collection[str]) -> Step:
    """The step in which no stage waits for another, but for what it reads of it.

    What is made of variables alone is the same for all micro-batches and waits for none of them, as the factors of
    gradients do for what they multiply (that of `tf.square`). What is open, since any stage may compute it, waits for
    none either: what reads it in the stage that it has waited for does so in its place (for an assertion, say).
    """
    editor, graph_index = StepEditor(item), item.graph_index
    waited: dict[str, set[str]] = {}
    """For each open node, the nodes in stages that it has waited for, or what it is made of has."""
    for name in graph_index.order:
        if name in once:
            continue
        part, inputs = parts.get(name), graph_index.nodes[name].input
        before = set().union(*(waited.get(source, ()) for source in graph_index.sources[name]))
        if part is None:
            back = [node_of(i) for i in inputs if not is_control(i) and node_of(i) in parts]
            if back:  # what is of no stage needs none but where a loop of TensorFlow 1 goes back
                raise passes_no_stage(f"{name} goes on with {back[0]} of stage {parts[back[0]].stage}")
            waited[name] = before.union(node_of(i) for i in inputs if node_of(i) in parts)
            kept = [i for i in inputs if node_of(i) not in parts]
        else:
            is_for_all = part.is_held and name not in graph_index.effects
            kept = [i for i in inputs if not is_control(i) or _may_wait(part, parts.get(node_of(i)), is_for_all)]
        if len(kept) < len(inputs):
            editor.set_inputs(name, kept)
        if part is not None:
            editor.add_control(name, sorted(one for one in before if parts[one].stage == part.stage))
    return editor.to_item()


def _may_wait(part: PipelinePart, before: PipelinePart | None, is_for_all: bool) -> bool:
    """Whether what is of `part` may wait for what is of `before`, if that is of one."""
    return before is None or (before.stage == part.stage and (before.is_held or not is_for_all))


def passes_no_stage(what: str) -> OptionError:
    """The error for a loop or a branch of TensorFlow 1, of nodes that have many values or none, in several stages."""
    return OptionError(
        "stages",
        f"{what}: a loop or a branch of TensorFlow 1 cannot be computed in stages. Call "
        "tf.compat.v1.enable_control_flow_v2() before the graph is built (after disable_v2_behavior()), which makes it "
        "one operation, or take a strategy without pipeline stages.",
    )


def _in_order_of_shared_state(freed: Step, before: Mapping[str, Iterable[str]]) -> Step:
    """The step in which what no stage holds is read and written in the order of the script, in whatever stages."""
    editor = StepEditor(freed)
    for name, waits in before.items():
        editor.add_control(name, waits)
    return editor.to_item()


def stage_of_handles(item: Step, context: Context) -> dict[str, int]:
    """The pipeline stage of each variable that one worker owns, by handle."""
    stage_of = {worker: stage for stage, worker in enumerate(context.plan.stages)}
    return {v.handle: stage_of[item.owners[v.name]] for v in item.variables if v.name in item.owners}
