"""Assign stages: which pipeline stage each node of the compute part belongs to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from autodist.errors import StrategyError
from autodist.graph.find_stages import find_stages
from autodist.graph.item import GraphItem
from autodist.graph.names import is_control, node_of
from autodist.graph.ops import Trait, having
from autodist.graph.pipeline_part import PipelinePart
from autodist.graph.seeds import live_calls
from autodist.graph.step_editor import StepEditor
from autodist.graph.waiting import free_constants, wait_past
from autodist.graph.walks import reach
from autodist.kernels.base import Context, Kernel
from autodist.nearest import listed

_READS = having(Trait.READ) - having(Trait.NOT_IN_XLA)
"""What reads a variable whole."""


@dataclass(frozen=True)
class AssignStages(Kernel):
    """Notes by which pipeline stage each node of the compute part is computed.

    What goes forward belongs to the latest stage among those of its inputs and of the variables that it reads. What
    the seed of the loss reaches belongs to the earliest among those of its inputs, where a variable counts as lying
    where it was used before; what a later variable's gradient alone is made of, to that variable's. What a batch alone
    leads to is left open: it is computed where it is read.
    """

    name: ClassVar[str] = "assign-stages"

    def apply(self, item: GraphItem, context: Context) -> GraphItem:
        if not context.goes_through_stages(item):
            return item
        _require_apart(item)
        item = _without_shared_waits(item)
        assignment = _Assignment(item, stage_of_handles(item, context))
        found = assignment.run()
        return replace(_without_waits_for_others(item, found, assignment.stages.once), pipeline_parts=found)


def _require_apart(item: GraphItem) -> None:
    """Passes if no micro-batch waits for what others make before it is computed to its end.

    Raises:
        StrategyError: one does, and those after it begin when it has ended.
    """
    if item.whole_sums:
        raise StrategyError(
            f"the step adds up or gathers over all examples while it computes ({item.whole_sums[0].node}), as "
            "synchronized batch normalisation and all_gather do, and the micro-batches of a pipeline come one after "
            "the other. Set synchronized=False and gather nothing, or take a strategy without pipeline stages."
        )


def _without_shared_waits(item: GraphItem) -> GraphItem:
    """The step in which a micro-batch waits for no other by way of what they share.

    Constants, and operations that do nothing but wait, are the same for all micro-batches: they would wait for all of
    them.
    """
    editor = StepEditor(item)
    roots = {*map(node_of, item.outputs), *item.targets}
    freed = free_constants(editor, item.wiring, roots)
    idle = {
        node.name for node in item.wiring.of_op("NoOp")
        if node.name not in roots and item.wiring.consumers[node.name] and item.wiring.sources[node.name]
    }  # fmt: skip
    if idle:
        wait_past(editor, set(editor.names) - idle)
        editor.remove(idle)
    return editor.to_item() if freed or idle else item


def _without_waits_for_others(item: GraphItem, parts: Mapping[str, PipelinePart], once: Collection[str]) -> GraphItem:
    """The step in which no stage waits for another, but for what it reads of it.

    What is open, since any stage may compute it, waits for none: what reads it in the stage that it has waited for does
    so in its place (for an assertion, say).
    """
    editor, wiring = StepEditor(item), item.wiring
    waited: dict[str, set[str]] = {}
    """For each open node, the nodes in stages that it has waited for, or what it is made of has."""
    for name in wiring.order:
        if name in once:
            continue
        part, inputs = parts.get(name), wiring.nodes[name].input
        before = set().union(*(waited.get(source, ()) for source in wiring.sources[name]))
        if part is None:
            waited[name] = before.union(node_of(i) for i in inputs if node_of(i) in parts)
            kept = [i for i in inputs if node_of(i) not in parts]
        else:
            kept = [i for i in inputs if not is_control(i) or parts.get(node_of(i), part).stage == part.stage]
        if len(kept) < len(inputs):
            editor.set_inputs(name, kept)
        if part is not None:
            editor.add_control(name, sorted(one for one in before if parts[one].stage == part.stage))
    return editor.to_item()


def stage_of_handles(item: GraphItem, context: Context) -> dict[str, int]:
    """The pipeline stage of each variable that one worker owns, by handle."""
    stage_of = {worker: stage for stage, worker in enumerate(context.plan.stages)}
    return {v.handle: stage_of[item.owners[v.name]] for v in item.variables if v.name in item.owners}


class _Assignment:
    """The work of one `AssignStages.apply`, in the order of `run`.

    Attributes:
        found: what is known of nodes so far.
        made_of: for each node that is made of variables alone, their handles.
        uses: for each variable that the batch meets on the way forward, the stages where, each with a node there.
        leads: for each node on the way back, the stages of the variables for whose gradients it is needed.
        used_at: for each node that is made of variables alone, the stages where the batch meets it.
    """

    def __init__(self, item: GraphItem, stage_of: Mapping[str, int]) -> None:
        self.item, self.stage_of, self.wiring = item, stage_of, item.wiring
        self.stages = find_stages(item)
        self.found: dict[str, PipelinePart] = {}
        self.made_of: dict[str, frozenset[str]] = {}
        self.uses: dict[str, dict[int, str]] = {}
        self.leads: dict[str, set[int]] = {}
        self.used_at: dict[str, set[int]] = {}
        self.of_batch = {node_of(name) for name, axis in item.inputs.items() if axis is not None}

    def run(self) -> dict[str, PipelinePart]:
        backward = self._require_one_way_back()
        computed = [name for name in self.wiring.order if name not in self.stages.once]
        for name in computed:
            if name not in backward:
                self._go_forward(name)
        self._require_used_at_home()
        self._find_leads([name for name in computed if name in backward])
        for name in computed:
            if name in backward:
                self._go_back(name)
        return self.found

    def _require_one_way_back(self) -> set[str]:
        """What the seed of the loss reaches, and what waits for such.

        Raises:
            StrategyError: the step differentiates twice.
        """
        calls = [self.item.gradient_calls[k] for k in live_calls(self.item)]
        if len(calls) > 1 or max(self.stages.level, default=1) > 1:
            raise StrategyError(
                f"the step differentiates {len(calls)} times ({listed(call.targets[0] for call in calls)}), and a "
                "pipeline goes forward and back once a step. Take the gradients of the sum of the losses in one call, "
                "train with a step for each loss, or take a strategy without pipeline stages, AllReduce say."
            )
        seeds = [name for call in calls for name in (call.seed, *(term.seed for term in call.terms))]
        return reach([s for s in seeds if s in self.wiring.nodes], self.wiring.consumers.__getitem__)

    # -- forward ---------------------------------------------------------------------------------------------------

    def _go_forward(self, name: str) -> None:
        touched = self._stages_touched(name)
        given = [s for s in self.wiring.data[name] if s in self.found]
        if touched is not None:
            self._touch(name, touched, given)
            return
        if not given:
            self._leave_open(name)
            return
        held = [s for s in given if self.found[s].is_held]
        stage = max(self.found[s].stage for s in given)
        is_held = len(held) == len(given) and self.of_batch.isdisjoint(self.wiring.data[name])
        self.found[name] = PipelinePart(stage, is_held=is_held)
        if is_held:
            self.made_of[name] = frozenset().union(*(self.made_of[s] for s in held))
        else:
            self._use(name, stage, held)

    def _leave_open(self, name: str) -> None:
        """Notes what no variable leads to: of a batch it is computed where it is read."""
        if not self.of_batch.isdisjoint(self.wiring.data[name]):
            self.of_batch.add(name)

    def _use(self, name: str, stage: int, held: Iterable[str]) -> None:
        for source in held:
            self.used_at.setdefault(source, set()).add(stage)
            for handle in self.made_of[source]:
                self.uses.setdefault(handle, {}).setdefault(stage, name)

    def _stages_touched(self, name: str) -> dict[int, str] | None:
        """The stages whose variables a node reads or writes itself, each with one of these; None if there are none.

        Raises:
            StrategyError: they are several.
        """
        effect = self.stages.effects.get(name)
        if effect is None:
            return None
        found = {self.stage_of[h]: h for h in sorted(effect.reads | effect.writes) if h in self.stage_of}
        if len(found) > 1:
            raise StrategyError(
                f"{name} ({self.wiring.nodes[name].op}) uses {listed(map(self._named, found.values()))}, which are in "
                f"different pipeline stages ({listed(map(str, sorted(found)))}): one operation is not cut. Put these "
                "variables into one stage."
            )
        return found or None

    def _touch(self, name: str, touched: Mapping[int, str], given: list[str]) -> None:
        """Notes what takes a variable's handle, and stands where the variable is."""
        ((stage, handle),) = touched.items()
        later = next((s for s in given if self.found[s].stage > stage), None)
        if later is not None:
            raise self._goes_back(handle, name, later)
        effect = self.stages.effects[name]
        is_held = self.wiring.nodes[name].op in _READS and not given
        self.found[name] = PipelinePart(stage, is_held=is_held)
        if is_held:
            self.made_of[name] = effect.reads
        else:
            self.uses.setdefault(handle, {}).setdefault(stage, name)

    def _require_used_at_home(self) -> None:
        """Passes if each variable that the batch meets does so in its own stage, at least once.

        Raises:
            StrategyError: all that uses one needs a later stage.
        """
        for handle, uses in self.uses.items():
            if self.stage_of.get(handle, 0) not in uses and handle in self.stage_of:
                name = uses[min(uses)]
                later = next(s for s in self.wiring.data[name] if s in self.found and self.found[s].stage == min(uses))
                raise self._goes_back(handle, name, later)

    def _goes_back(self, handle: str, name: str, later: str) -> StrategyError:
        stage = self.found[later].stage
        return StrategyError(
            f"{self._named(handle)} is in pipeline stage {self.stage_of[handle]}, and what is computed with it, {name} "
            f"({self.wiring.nodes[name].op}), needs {later} of stage {stage}: the way from stage to stage goes back "
            f"there. Put {self._named(handle)} into stage {stage} or a later one, or what comes before it into an "
            "earlier one."
        )

    def _named(self, handle: str) -> str:
        return self.item.by_handle[handle].name

    # -- backward --------------------------------------------------------------------------------------------------

    def _go_back(self, name: str) -> None:
        touched = self._stages_touched(name)
        given = [s for s in self.wiring.data[name] if s in self.found]
        if touched is not None:
            ((stage, _),) = touched.items()
            is_held = self.wiring.nodes[name].op in _READS and not given
            self.found[name] = PipelinePart(stage, is_backward=True, is_held=is_held)
            if is_held:
                self.made_of[name] = self.stages.effects[name].reads
            return
        if not given:
            self._leave_open(name)
            return
        held = [s for s in given if self.found[s].is_held]
        stages = [self.found[s].stage for s in given if not self.found[s].is_held]
        if not stages:
            is_held = self.of_batch.isdisjoint(self.wiring.data[name])
            stage = min(self.found[s].stage for s in held)
            self.found[name] = PipelinePart(stage, is_backward=True, is_held=is_held)
            if is_held:
                self.made_of[name] = frozenset().union(*(self.made_of[s] for s in held))
            return
        back = [self.found[s].stage for s in given if self.found[s].is_backward]
        self.found[name] = PipelinePart(self._stage_going_back(name, min(back or stages), given), is_backward=True)

    def _stage_going_back(self, name: str, latest: int, given: Sequence[str]) -> int:
        """The stage of a node on the way back whose inputs of that way are there at the stage `latest`, or later ones.

        A weight's gradient is computed where the weight is, since what it was multiplied by has come there before.
        """
        forward = [s for s in given if not self.found[s].is_backward]
        leads = self.leads[name]
        if not forward:
            return min(latest, *leads) if len(leads) == 1 else latest
        found = latest
        for source in forward:
            part = self.found[source]
            stages = self._stages_using(source) if part.is_held else {part.stage}
            found = min([found, *([max(before)] if (before := [s for s in stages if s <= latest]) else [])])
        return min(latest, max(found, min(leads, default=found)))

    def _find_leads(self, backward: Sequence[str]) -> None:
        of_gradient: dict[str, set[int]] = {}
        for gradient in self.stages.gradients:
            handle = self.item.by_name[gradient.variable].handle
            for name in gradient.tensors if handle in self.stage_of else ():
                of_gradient.setdefault(node_of(name), set()).add(self.stage_of[handle])
        for name in reversed(backward):
            readers = (self.leads[c] for c in self.wiring.consumers[name] if c in self.leads)
            self.leads[name] = of_gradient.get(name, set()).union(*readers)

    def _stages_using(self, name: str) -> set[int]:
        """Where the batch meets a node that is made of variables alone, or what it is made of."""
        if name in self.used_at:
            return self.used_at[name]
        return set().union(*(self._stages_using(s) for s in self.wiring.data[name] if s in self.made_of))
