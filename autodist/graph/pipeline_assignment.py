"""Assignment of each node of the compute part to a pipeline stage and a direction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autodist.graph.find_lists import find_lists
from autodist.graph.find_shared_before import find_shared_before
from autodist.graph.find_stages import find_stages
from autodist.graph.names import node_of
from autodist.graph.ops import Trait, having
from autodist.graph.parts import PipelinePart
from autodist.graph.seeds import live_calls
from autodist.graph.stage_marks import marked_stage
from autodist.graph.step import CapturedStep
from autodist.graph.walks import reach
from autodist.logs.formatting import listed
from autodist.options.fields import OptionError

_READS = having(Trait.READ) - having(Trait.NOT_IN_XLA)
"""Ops that read a complete variable."""


class Assignment:
    """Follows the arithmetic of a step from stage to stage, in the order of `run`.

    Args:
        step: the step.
        stage_of: maps the handle of each variable that a stage holds to the stage.
        count: number of stages.

    Attributes:
        found: the parts of nodes assigned so far.
        made_of: maps each node computed from variables alone to their handles.
        uses: maps each variable combined with the batch in the forward pass to {stage: a node there}.
        leads: maps each backward node to the stages of the variables whose gradients need it.
        used_at: maps each node computed from variables alone to the stages that combine it with the batch.
        shared_before: maps each access of a variable that no stage holds to the earlier accesses that matter.
    """

    def __init__(self, step: CapturedStep, stage_of: Mapping[str, int], count: int) -> None:
        self.step, self.stage_of, self.count, self.graph_index = step, stage_of, count, step.graph_index
        self.stages = find_stages(step)
        self.leads: dict[str, set[int]] = {}
        self._computed = [name for name in self.graph_index.order if name not in self.stages.once]
        self._lists = find_lists(self.graph_index, self._computed)
        self.shared_before = find_shared_before(step, set(self._computed), stage_of.keys())
        self._stage_of_lists: dict[frozenset[str], int] = {}
        """The stage of nodes connected by lists of tensors: the latest stage of any of them."""
        self._reset()

    def _reset(self) -> None:
        self.found: dict[str, PipelinePart] = {}
        self.made_of: dict[str, frozenset[str]] = {}
        self.uses: dict[str, dict[int, str]] = {}
        self.used_at: dict[str, set[int]] = {}
        self.of_batch = set(map(node_of, self.step.batch_axes))

    def run(self) -> dict[str, PipelinePart]:
        backward = self._require_one_backward_pass()
        forward = [name for name in self._computed if name not in backward]
        self._assign_all_forward(forward)
        while self._find_stages_of_lists(forward):
            self._reset()
            self._assign_all_forward(forward)
        self._require_used_in_own_stage()
        back = [name for name in self._computed if name in backward]
        self._find_leads(back)
        for name in back:
            self._assign_backward(name)
        return self.found

    def refuse(self, option: str, reason: str) -> None:
        """Rejects a step that does not fit the stages; overridden by a class that only estimates.

        Raises:
            StrategyError: the `reason`, with the position of the `option`.
        """
        raise OptionError(option, reason)

    def mark_of(self, name: str) -> int | None:
        """Returns the stage in which the script created a node (`ad.stage`); None: unspecified."""
        return marked_stage(self.graph_index.nodes[name])

    def _require_one_backward_pass(self) -> set[str]:
        """Returns the nodes that depend on the seed of the loss or wait for such nodes.

        Raises:
            StrategyError: the step differentiates twice.
        """
        calls = [self.step.gradient_calls[k] for k in live_calls(self.step)]
        if len(calls) > 1 or max(self.stages.level, default=1) > 1:
            self.refuse(
                "builder",
                f"the step differentiates {len(calls)} times ({listed(call.targets[0] for call in calls)}), but a "
                "pipeline runs forward and backward once per step. Compute the gradients of the sum of the losses in "
                "one call, train with a step for each loss, or use a strategy without pipeline stages, e.g. AllReduce.",
            )
        seeds = [seed for call in calls for seed in call.seeds if seed in self.graph_index.nodes]
        return reach(seeds, self.graph_index.consumers.__getitem__)

    def _sources_of(self, name: str) -> list[str]:
        """Returns the inputs of a node and the earlier writes of the shared variables that it reads."""
        effects = self.stages.effects
        before = self.shared_before.get(name, ())
        return [*self.graph_index.data[name], *(b for b in before if effects[b].writes & effects[name].reads)]

    # -- forward ---------------------------------------------------------------------------------------------------

    def _assign_all_forward(self, forward: Iterable[str]) -> None:
        for name in forward:
            self._assign_forward(name)

    def _find_stages_of_lists(self, forward: Iterable[str]) -> bool:
        """Records the latest stage of nodes connected by lists; returns True if any moved to a later stage."""
        before = dict(self._stage_of_lists)
        for name in forward:
            connected, part = self._lists.get(name), self.found.get(name)
            if connected is not None and part is not None:
                self._stage_of_lists[connected] = max(self._stage_of_lists.get(connected, 0), part.stage)
        return any(stage > before.get(connected, 0) for connected, stage in self._stage_of_lists.items())

    def _assign_forward(self, name: str) -> None:
        accessed = self._accessed_stage(name)
        sources = self._sources_of(name)
        assigned = [s for s in sources if s in self.found]
        is_of_batch = not self.of_batch.isdisjoint(sources)
        if accessed is not None:
            self._assign_access(name, accessed, assigned, is_of_batch)
            return
        if not assigned:
            self._defer(name, is_of_batch)
            return
        held = [s for s in assigned if self.found[s].is_held]
        is_held = len(held) == len(assigned) and not is_of_batch
        stage = max(self.found[s].stage for s in assigned)
        stage = stage if is_held else self._marked_stage(name, stage, assigned)
        self.found[name] = PipelinePart(stage, is_held=is_held)
        if is_held:
            self.made_of[name] = frozenset().union(*(self.made_of[s] for s in held))
        else:
            self._record_use(name, stage, held)

    def _defer(self, name: str, is_of_batch: bool) -> None:
        """Records a node that depends on no variable: if it depends on the batch, its mark or its readers decide."""
        mark = self.mark_of(name) if is_of_batch else None
        if mark is not None:
            self.found[name] = PipelinePart(self._marked_stage(name, mark, []))
        elif is_of_batch:
            self.of_batch.add(name)

    def _marked_stage(self, name: str, stage: int, assigned: Sequence[str]) -> int:
        """Returns the stage of a node whose inputs are available at `stage`: that of its mark if it has one.

        Raises:
            StrategyError: the marked stage is earlier or does not exist.
        """
        mark = self.mark_of(name)
        if mark is None:
            return max(stage, self._stage_of_lists.get(self._lists.get(name, frozenset()), 0))
        made = f"{name} ({self.graph_index.nodes[name].op}) is created in ad.stage({mark})"
        if mark >= self.count:
            self.refuse(
                "stages",
                f"{made}, but the pipeline has {self.count} stages, up to stage {self.count - 1}. Create it in one of "
                "these, or use more stages and workers.",
            )
        if mark < stage:
            later = next(s for s in assigned if self.found[s].stage == stage)
            of = f" ({listed(map(self._label, sorted(self.made_of[later])))})" if later in self.made_of else ""
            self.refuse(
                "stages",
                f"{made}, but needs {later}{of} of stage {stage}: data would flow back to an earlier stage. Create it "
                f"in ad.stage({stage}) or a later one, or its input in an earlier one.",
            )
        return mark

    def _record_use(self, name: str, stage: int, held: Iterable[str]) -> None:
        for source in held:
            self.used_at.setdefault(source, set()).add(stage)
            for handle in self.made_of[source]:
                self.uses.setdefault(handle, {}).setdefault(stage, name)

    def _accessed_stage(self, name: str) -> tuple[int, str] | None:
        """Returns (stage, handle) of a variable that a node reads or writes; None if there is none.

        Raises:
            StrategyError: the variables are in several stages.
        """
        effect = self.stages.effects.get(name)
        if effect is None:
            return None
        handles = {self.stage_of[h]: h for h in sorted(effect.reads | effect.writes) if h in self.stage_of}
        if len(handles) > 1:
            self.refuse(
                "stages",
                f"{name} ({self.graph_index.nodes[name].op}) uses {listed(map(self._label, handles.values()))}, which "
                f"are in different pipeline stages ({listed(map(str, sorted(handles)))}): one operation "
                "cannot be split. Put these variables into one stage.",
            )
        return max(handles.items(), default=None)

    def _assign_access(self, name: str, accessed: tuple[int, str], assigned: list[str], is_of_batch: bool) -> None:
        """Assigns a node that takes a variable's handle to the stage of the variable."""
        stage, handle = accessed
        later = next((s for s in assigned if self.found[s].stage > stage), None)
        if later is not None:
            self.refuse("stages", self._flows_back(handle, name, later))
        effect = self.stages.effects[name]
        is_read = self.graph_index.nodes[name].op in _READS and not assigned
        is_held = not is_of_batch and all(self.found[s].is_held for s in assigned)
        mark = self.mark_of(name)
        if mark is not None and mark < stage and not is_read:
            self.refuse("stages", self._is_created_elsewhere(handle, name, mark))
        self.found[name] = PipelinePart(stage, is_held=is_held)
        if is_held:
            self.made_of[name] = (effect.reads | effect.writes).union(*(self.made_of[s] for s in assigned))
        if not is_read:
            self.uses.setdefault(handle, {}).setdefault(stage, name)

    def _require_used_in_own_stage(self) -> None:
        """Passes if each variable combined with the batch is combined in its own stage at least once.

        Raises:
            StrategyError: all uses of a variable need a later stage.
        """
        for handle, uses in self.uses.items():
            if self.stage_of.get(handle, 0) not in uses and handle in self.stage_of:
                name = uses[min(uses)]
                sources = [s for s in self.graph_index.data[name] if s in self.found]
                later = next((s for s in sources if self.found[s].stage == min(uses)), None)
                if later is None:  # only because of its mark
                    self.refuse("stages", self._is_created_elsewhere(handle, name, min(uses)))
                else:
                    self.refuse("stages", self._flows_back(handle, name, later))

    def _is_created_elsewhere(self, handle: str, name: str, mark: int) -> str:
        return (
            f"{name} ({self.graph_index.nodes[name].op}) is created in ad.stage({mark}), but uses "
            f"{self._label(handle)}, which is in pipeline stage {self.stage_of[handle]}. Create both in one stage."
        )

    def _flows_back(self, handle: str, name: str, later: str) -> str:
        stage = self.found[later].stage
        return (
            f"{self._label(handle)} is in pipeline stage {self.stage_of[handle]}, but its reader {name} "
            f"({self.graph_index.nodes[name].op}) needs {later} of stage {stage}: data would flow back to an earlier "
            f"stage. Put {self._label(handle)} into stage {stage} or a later one, or the inputs of {name} into an "
            "earlier one."
        )

    def _label(self, handle: str) -> str:
        return self.step.by_handle[handle].name

    # -- backward --------------------------------------------------------------------------------------------------

    def _assign_backward(self, name: str) -> None:
        accessed = self._accessed_stage(name)
        sources = self._sources_of(name)
        assigned = [s for s in sources if s in self.found]
        if accessed is not None:
            stage, _ = accessed
            is_held = self.graph_index.nodes[name].op in _READS and not assigned
            self.found[name] = PipelinePart(stage, is_backward=True, is_held=is_held)
            if is_held:
                self.made_of[name] = self.stages.effects[name].reads
            return
        if not assigned:
            if not self.of_batch.isdisjoint(sources):
                self.of_batch.add(name)
            return
        held = [s for s in assigned if self.found[s].is_held]
        stages = [self.found[s].stage for s in assigned if not self.found[s].is_held]
        if not stages:
            is_held = self.of_batch.isdisjoint(sources)
            stage = min(self.found[s].stage for s in held)
            self.found[name] = PipelinePart(stage, is_backward=True, is_held=is_held)
            if is_held:
                self.made_of[name] = frozenset().union(*(self.made_of[s] for s in held))
            return
        latest = min([self.found[s].stage for s in assigned if self.found[s].is_backward] or stages)
        connected = self._lists.get(name)
        if connected is None:
            stage = self._backward_stage(name, latest, assigned)
        else:
            stage = min(latest, self._stage_of_lists.setdefault(connected, latest))
        self.found[name] = PipelinePart(stage, is_backward=True)

    def _backward_stage(self, name: str, latest: int, assigned: Sequence[str]) -> int:
        """Returns the stage of a backward node whose backward inputs are available at the stage `latest` or later.

        A weight's gradient is computed in the stage of the weight, which already has the other factor of the product.
        """
        forward = [s for s in assigned if not self.found[s].is_backward]
        leads = self.leads[name]
        if not forward:
            return min(latest, *leads) if len(leads) == 1 else latest
        earliest = latest
        for source in forward:
            part = self.found[source]
            stages = self._stages_using(source) if part.is_held else {part.stage}
            earliest = min([earliest, *([max(before)] if (before := [s for s in stages if s <= latest]) else [])])
        return min(latest, max(earliest, min(leads, default=earliest)))

    def _find_leads(self, backward: Sequence[str]) -> None:
        of_gradient: dict[str, set[int]] = {}
        for gradient in self.stages.gradients:
            handle = self.step.by_name[gradient.variable].handle
            for name in gradient.tensors if handle in self.stage_of else ():
                of_gradient.setdefault(node_of(name), set()).add(self.stage_of[handle])
        for name in reversed(backward):
            readers = (self.leads[c] for c in self.graph_index.consumers[name] if c in self.leads)
            self.leads[name] = of_gradient.get(name, set()).union(*readers)

    def _stages_using(self, name: str) -> set[int]:
        """Returns the stages that combine a node computed from variables, or one of its variables, with the batch."""
        if name in self.used_at:
            return self.used_at[name]
        return set().union(*(self._stages_using(s) for s in self.graph_index.data[name] if s in self.made_of))
