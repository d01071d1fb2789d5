"""Assignment: by which pipeline stage, and in which direction, each node of the compute part is computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autodist.graph.find_lists import find_lists
from autodist.graph.find_shared_before import find_shared_before
from autodist.graph.find_stages import find_stages
from autodist.graph.names import node_of
from autodist.graph.ops import Trait, having
from autodist.graph.pipeline_part import PipelinePart
from autodist.graph.seeds import live_calls
from autodist.graph.stage_marks import marked_stage
from autodist.graph.step import Step
from autodist.graph.walks import reach
from autodist.logs.formatting import listed
from autodist.options.fields import OptionError

_READS = having(Trait.READ) - having(Trait.NOT_IN_XLA)
"""What reads a variable whole."""


class Assignment:
    """Follows the arithmetic of a step from stage to stage, in the order of `run`.

    Args:
        item: the step.
        stage_of: the pipeline stage of each variable that one has, by handle.
        count: how many stages there are.

    Attributes:
        found: what is known of nodes so far.
        made_of: for each node that is made of variables alone, their handles.
        uses: for each variable that the batch meets on the way forward, the stages where, each with a node there.
        leads: for each node on the way back, the stages of the variables for whose gradients it is needed.
        used_at: for each node that is made of variables alone, the stages where the batch meets it.
        shared_before: for each node that reads or writes what no stage has, those before it that make a difference.
    """

    def __init__(self, item: Step, stage_of: Mapping[str, int], count: int) -> None:
        self.item, self.stage_of, self.count, self.graph_index = item, stage_of, count, item.graph_index
        self.stages = find_stages(item)
        self.leads: dict[str, set[int]] = {}
        self._computed = [name for name in self.graph_index.order if name not in self.stages.once]
        self._lists = find_lists(self.graph_index, self._computed)
        self.shared_before = find_shared_before(item, set(self._computed), stage_of.keys())
        self._stage_of_lists: dict[frozenset[str], int] = {}
        """The stage of nodes that are tied by lists of tensors: the latest that any of them is in."""
        self._begin()

    def _begin(self) -> None:
        self.found: dict[str, PipelinePart] = {}
        self.made_of: dict[str, frozenset[str]] = {}
        self.uses: dict[str, dict[int, str]] = {}
        self.used_at: dict[str, set[int]] = {}
        self.of_batch = {node_of(name) for name, axis in self.item.inputs.items() if axis is not None}

    def run(self) -> dict[str, PipelinePart]:
        backward = self._require_one_way_back()
        forward = [name for name in self._computed if name not in backward]
        self._go_all_forward(forward)
        while self._find_stages_of_lists(forward):
            self._begin()
            self._go_all_forward(forward)
        self._require_used_at_home()
        back = [name for name in self._computed if name in backward]
        self._find_leads(back)
        for name in back:
            self._go_back(name)
        return self.found

    def refuse(self, option: str, reason: str) -> None:
        """Called for what does not go through the stages; who only estimates goes on.

        Raises:
            StrategyError: the `reason`, with the place of the `option`.
        """
        raise OptionError(option, reason)

    def mark_of(self, name: str) -> int | None:
        """The stage in which the script has made a node (`ad.stage`); None: it does not say."""
        return marked_stage(self.graph_index.nodes[name])

    def _require_one_way_back(self) -> set[str]:
        """What the seed of the loss reaches, and what waits for such.

        Raises:
            StrategyError: the step differentiates twice.
        """
        calls = [self.item.gradient_calls[k] for k in live_calls(self.item)]
        if len(calls) > 1 or max(self.stages.level, default=1) > 1:
            self.refuse(
                "builder",
                f"the step differentiates {len(calls)} times ({listed(call.targets[0] for call in calls)}), and a "
                "pipeline goes forward and back once a step. Take the gradients of the sum of the losses in one call, "
                "train with a step for each loss, or take a strategy without pipeline stages, AllReduce say.",
            )
        seeds = [name for call in calls for name in (call.seed, *(term.seed for term in call.terms))]
        return reach([s for s in seeds if s in self.graph_index.nodes], self.graph_index.consumers.__getitem__)

    def _given(self, name: str) -> list[str]:
        """What a node computes with: its inputs, and earlier writes of the shared variables that it reads."""
        effects = self.stages.effects
        before = self.shared_before.get(name, ())
        return [*self.graph_index.data[name], *(b for b in before if effects[b].writes & effects[name].reads)]

    # -- forward ---------------------------------------------------------------------------------------------------

    def _go_all_forward(self, forward: Iterable[str]) -> None:
        for name in forward:
            self._go_forward(name)

    def _find_stages_of_lists(self, forward: Iterable[str]) -> bool:
        """Notes the latest stage of what lists tie together; whether that has come to be a later one for any."""
        before = dict(self._stage_of_lists)
        for name in forward:
            tied, part = self._lists.get(name), self.found.get(name)
            if tied is not None and part is not None:
                self._stage_of_lists[tied] = max(self._stage_of_lists.get(tied, 0), part.stage)
        return any(stage > before.get(tied, 0) for tied, stage in self._stage_of_lists.items())

    def _go_forward(self, name: str) -> None:
        touched = self._stage_touched(name)
        sources = self._given(name)
        given = [s for s in sources if s in self.found]
        is_of_batch = not self.of_batch.isdisjoint(sources)
        if touched is not None:
            self._touch(name, touched, given, is_of_batch)
            return
        if not given:
            self._leave_open(name, is_of_batch)
            return
        held = [s for s in given if self.found[s].is_held]
        is_held = len(held) == len(given) and not is_of_batch
        stage = max(self.found[s].stage for s in given)
        stage = stage if is_held else self._marked(name, stage, given)
        self.found[name] = PipelinePart(stage, is_held=is_held)
        if is_held:
            self.made_of[name] = frozenset().union(*(self.made_of[s] for s in held))
        else:
            self._use(name, stage, held)

    def _leave_open(self, name: str, is_of_batch: bool) -> None:
        """Notes what no variable leads to: of a batch it is computed where it is read, or where it is marked to be."""
        mark = self.mark_of(name) if is_of_batch else None
        if mark is not None:
            self.found[name] = PipelinePart(self._marked(name, mark, []))
        elif is_of_batch:
            self.of_batch.add(name)

    def _marked(self, name: str, stage: int, given: Sequence[str]) -> int:
        """The stage of a node whose inputs are there at `stage`: that in which the script has made it, if it has.

        Raises:
            StrategyError: that is an earlier one, or there is none such.
        """
        mark = self.mark_of(name)
        if mark is None:
            return max(stage, self._stage_of_lists.get(self._lists.get(name, frozenset()), 0))
        made = f"{name} ({self.graph_index.nodes[name].op}) is made in ad.stage({mark})"
        if mark >= self.count:
            self.refuse(
                "stages",
                f"{made}, and the pipeline has {self.count} stages, of which the last is stage {self.count - 1}. Give "
                "it to one of these, or take as many stages, and workers.",
            )
        if mark < stage:
            later = next(s for s in given if self.found[s].stage == stage)
            of = f" ({listed(map(self._named, sorted(self.made_of[later])))})" if later in self.made_of else ""
            self.refuse(
                "stages",
                f"{made}, and needs {later}{of} of stage {stage}: the way from stage to stage goes back there. Make "
                f"it in ad.stage({stage}) or a later one, or what it needs in an earlier one.",
            )
        return mark

    def _use(self, name: str, stage: int, held: Iterable[str]) -> None:
        for source in held:
            self.used_at.setdefault(source, set()).add(stage)
            for handle in self.made_of[source]:
                self.uses.setdefault(handle, {}).setdefault(stage, name)

    def _stage_touched(self, name: str) -> tuple[int, str] | None:
        """The stage whose variables a node reads or writes itself, and one of these; None if there is none.

        Raises:
            StrategyError: they are several.
        """
        effect = self.stages.effects.get(name)
        if effect is None:
            return None
        found = {self.stage_of[h]: h for h in sorted(effect.reads | effect.writes) if h in self.stage_of}
        if len(found) > 1:
            self.refuse(
                "stages",
                f"{name} ({self.graph_index.nodes[name].op}) uses {listed(map(self._named, found.values()))}, which "
                f"are in different pipeline stages ({listed(map(str, sorted(found)))}): one operation is not cut. Put "
                "these variables into one stage.",
            )
        return max(found.items(), default=None)

    def _touch(self, name: str, touched: tuple[int, str], given: list[str], is_of_batch: bool) -> None:
        """Notes what takes a variable's handle, and stands where the variable is."""
        stage, handle = touched
        later = next((s for s in given if self.found[s].stage > stage), None)
        if later is not None:
            self.refuse("stages", self._goes_back(handle, name, later))
        effect = self.stages.effects[name]
        is_read = self.graph_index.nodes[name].op in _READS and not given
        is_held = not is_of_batch and all(self.found[s].is_held for s in given)
        mark = self.mark_of(name)
        if mark is not None and mark < stage and not is_read:
            self.refuse("stages", self._is_made_elsewhere(handle, name, mark))
        self.found[name] = PipelinePart(stage, is_held=is_held)
        if is_held:
            self.made_of[name] = (effect.reads | effect.writes).union(*(self.made_of[s] for s in given))
        if not is_read:
            self.uses.setdefault(handle, {}).setdefault(stage, name)

    def _require_used_at_home(self) -> None:
        """Passes if each variable that the batch meets does so in its own stage, at least once.

        Raises:
            StrategyError: all that uses one needs a later stage.
        """
        for handle, uses in self.uses.items():
            if self.stage_of.get(handle, 0) not in uses and handle in self.stage_of:
                name = uses[min(uses)]
                sources = [s for s in self.graph_index.data[name] if s in self.found]
                later = next((s for s in sources if self.found[s].stage == min(uses)), None)
                if later is None:  # by its mark alone
                    self.refuse("stages", self._is_made_elsewhere(handle, name, min(uses)))
                else:
                    self.refuse("stages", self._goes_back(handle, name, later))

    def _is_made_elsewhere(self, handle: str, name: str, mark: int) -> str:
        return (
            f"{name} ({self.graph_index.nodes[name].op}) is made in ad.stage({mark}), and uses {self._named(handle)}, "
            f"which is in pipeline stage {self.stage_of[handle]}. Make both in one stage."
        )

    def _goes_back(self, handle: str, name: str, later: str) -> str:
        stage = self.found[later].stage
        return (
            f"{self._named(handle)} is in pipeline stage {self.stage_of[handle]}, and what is computed with it, {name} "
            f"({self.graph_index.nodes[name].op}), needs {later} of stage {stage}: the way from stage to stage goes "
            f"back there. Put {self._named(handle)} into stage {stage} or a later one, or what comes before it into an "
            "earlier one."
        )

    def _named(self, handle: str) -> str:
        return self.item.by_handle[handle].name

    # -- backward --------------------------------------------------------------------------------------------------

    def _go_back(self, name: str) -> None:
        touched = self._stage_touched(name)
        sources = self._given(name)
        given = [s for s in sources if s in self.found]
        if touched is not None:
            stage, _ = touched
            is_held = self.graph_index.nodes[name].op in _READS and not given
            self.found[name] = PipelinePart(stage, is_backward=True, is_held=is_held)
            if is_held:
                self.made_of[name] = self.stages.effects[name].reads
            return
        if not given:
            if not self.of_batch.isdisjoint(sources):
                self.of_batch.add(name)
            return
        held = [s for s in given if self.found[s].is_held]
        stages = [self.found[s].stage for s in given if not self.found[s].is_held]
        if not stages:
            is_held = self.of_batch.isdisjoint(sources)
            stage = min(self.found[s].stage for s in held)
            self.found[name] = PipelinePart(stage, is_backward=True, is_held=is_held)
            if is_held:
                self.made_of[name] = frozenset().union(*(self.made_of[s] for s in held))
            return
        latest = min([self.found[s].stage for s in given if self.found[s].is_backward] or stages)
        tied = self._lists.get(name)
        if tied is None:
            stage = self._stage_going_back(name, latest, given)
        else:
            stage = min(latest, self._stage_of_lists.setdefault(tied, latest))
        self.found[name] = PipelinePart(stage, is_backward=True)

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
            readers = (self.leads[c] for c in self.graph_index.consumers[name] if c in self.leads)
            self.leads[name] = of_gradient.get(name, set()).union(*readers)

    def _stages_using(self, name: str) -> set[int]:
        """The stages in which the batch meets a node that is made of variables alone, or one of its variables."""
        if name in self.used_at:
            return self.used_at[name]
        return set().union(*(self._stages_using(s) for s in self.graph_index.data[name] if s in self.made_of))
