"""Assignment of each node of the compute part to a pipeline stage."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from autodist.graph.effects import passes_handle
from autodist.graph.names import is_control, node_of
from autodist.graph.parts import PipelinePart
from autodist.graph.pipeline_assignment import Assignment
from autodist.graph.step import PlacedStep, StepWithOwners
from autodist.graph.step_editor import StepEditor
from autodist.graph.waiting import free_constants, redirect_control_inputs
from autodist.kernels.base import Context, Kernel
from autodist.options.fields import OptionError


@dataclass(frozen=True)
class AssignStages(Kernel[PlacedStep, PlacedStep]):
    """Assigns each node of the compute part to a pipeline stage.

    A forward node belongs to the latest stage of its inputs and of the variables that it reads. A node that depends on
    the loss's seed belongs to the earliest stage of its inputs; a variable counts as part of the stage that used it
    before. A node that serves only the gradient of a later variable belongs to that variable's stage. A node that
    depends only on a batch is left open and runs where it is read. Forward nodes that the script creates in a stage
    (`ad.stage`) stay there.
    """

    name: ClassVar[str] = "assign-stages"
    after: ClassVar[Mapping[str, str]] = {
        "partition-variables": "it creates the shards",
        "advance-generators": "it replaces draws",
    }

    def apply(self, step: PlacedStep, context: Context) -> PlacedStep:
        if not context.goes_through_stages(step):
            return step
        _require_independent_micro_batches(step)
        step = _without_shared_waits(step)
        assignment = Assignment(step, stage_of_handles(step, context), len(context.placement.stages.groups))
        parts = assignment.run()
        freed = _without_waits_for_others(step, parts, assignment.stages.once)
        return replace(_in_order_of_shared_state(freed, assignment.shared_before), pipeline_parts=parts)


def _require_independent_micro_batches(step: PlacedStep) -> None:
    """Checks that no micro-batch waits for other micro-batches before its computation ends.

    Raises:
        StrategyError: the step computes with a sum over all micro-batches.
    """
    if step.in_step_all_reduces:
        raise OptionError(
            "builder",
            f"the step reduces or gathers over all examples while it computes ({step.in_step_all_reduces[0].node}), as "
            "synchronized batch normalisation, all_gather and losses of deviations from a batch mean do, but a "
            "pipeline processes micro-batches one after another. Set synchronized=False, gather nothing and use "
            "keras.layers.BatchNormalization, or use a strategy without pipeline stages.",
        )


def _without_shared_waits(step: PlacedStep) -> PlacedStep:
    """Removes waits of micro-batches for each other through shared nodes.

    Constants and NoOps are shared by all micro-batches, and would wait for all of them.
    """
    editor = StepEditor(step)
    roots = {*map(node_of, step.outputs), *step.targets}
    freed = free_constants(editor, step.graph_index, roots)
    idle = {
        node.name for node in step.graph_index.of_op("NoOp")
        if node.name not in roots and step.graph_index.consumers[node.name] and step.graph_index.sources[node.name]
    }  # fmt: skip
    if idle:
        redirect_control_inputs(editor, set(editor.names) - idle)
        editor.remove(idle)
    return editor.to_step() if freed or idle else step


def _without_waits_for_others(step: PlacedStep, parts: Mapping[str, PipelinePart], once: Collection[str]) -> PlacedStep:
    """Removes control dependencies between stages, and dependencies of shared nodes on single micro-batches.

    A node that depends only on variables, such as a factor in the gradient of `tf.square`, is the same for all
    micro-batches and waits for none. An open node, which any stage may compute, waits for none either. Its readers wait
    instead, each for the nodes of its own stage (for an assertion, for example). The handle of a copy still waits for
    the write of the copy: TensorFlow passes a loop's handles to later nodes, which then do not wait for the loop.
    """
    editor, graph_index = StepEditor(step), step.graph_index
    waited: dict[str, set[str]] = {}
    """Maps each open node to the nodes in stages that it or its inputs waited for."""
    for name in graph_index.order:
        if name in once:
            continue
        part, inputs = parts.get(name), graph_index.nodes[name].input
        before = set().union(*(waited.get(source, ()) for source in graph_index.sources[name]))
        if part is None:
            back = [node_of(i) for i in inputs if not is_control(i) and node_of(i) in parts]
            if back:  # a node without a stage has a staged input only at the back edge of a TensorFlow 1 loop
                raise passes_no_stage(f"{name} reads {back[0]} of stage {parts[back[0]].stage}")
            waited[name] = before.union(node_of(i) for i in inputs if node_of(i) in parts)
            is_handle = passes_handle(graph_index.nodes[name])
            kept = [i for i in inputs if node_of(i) not in parts or (is_handle and parts[node_of(i)].is_held)]
        else:
            is_for_all = part.is_held and name not in graph_index.effects
            kept = [i for i in inputs if not is_control(i) or _may_wait(part, parts.get(node_of(i)), is_for_all)]
        if len(kept) < len(inputs):
            editor.set_inputs(name, kept)
        if part is not None:
            editor.add_control(name, sorted(one for one in before if parts[one].stage == part.stage))
    return editor.to_step()


def _may_wait(part: PipelinePart, before: PipelinePart | None, is_for_all: bool) -> bool:
    """Returns True if a node of `part` may have a control dependency on a node of `before` (None: no stage)."""
    return before is None or (before.stage == part.stage and (before.is_held or not is_for_all))


def passes_no_stage(what: str) -> OptionError:
    """Returns the error for TensorFlow 1 control flow that spans several stages."""
    return OptionError(
        "stages",
        f"{what}: a loop or a branch of TensorFlow 1 cannot be computed in stages. Call "
        "tf.compat.v1.enable_control_flow_v2() before the graph is built (after disable_v2_behavior()), which makes it "
        "a single operation, or use a strategy without pipeline stages.",
    )


def _in_order_of_shared_state(freed: PlacedStep, before: Mapping[str, Iterable[str]]) -> PlacedStep:
    """Orders accesses to state that no single stage holds as in the script, whatever stages they are in."""
    editor = StepEditor(freed)
    for name, waits in before.items():
        editor.add_control(name, waits)
    return editor.to_step()


def stage_of_handles(step: StepWithOwners, context: Context) -> dict[str, int]:
    """Returns the pipeline stage of each owned variable, by handle."""
    stages, owners = context.placement.stages, step.owners
    return {v.handle: stages.stage_of(owners[v.name]) for v in step.variables if v.name in owners}
