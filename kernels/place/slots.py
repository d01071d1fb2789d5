"""Slots: the variables that an optimizer keeps for each trained variable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autodist.graph.effects import NO_EFFECT
from autodist.graph.find_stages import find_stages, nodes_for
from autodist.graph.names import is_control, node_of
from autodist.graph.ops import Trait, having
from autodist.graph.parts import Variable
from autodist.graph.stages import Stages
from autodist.graph.step import CapturedStep, Step
from autodist.graph.walks import reach

_SEVERAL_OPS = having(Trait.CALL | Trait.BRANCH | Trait.LOOP)

Handles = frozenset[str]


def find_slots(step: CapturedStep) -> dict[str, tuple[Variable, ...]]:
    """Returns the slots of each trained variable; counters, which serve several variables, belong to none."""
    stages = find_stages(step)
    found: dict[str, list[Variable]] = {gradient.variable: [] for gradient in step.gradients}
    trained = {step.by_name[name].handle: name for name in found}
    served = ServedVariables(step, stages, trained)
    written = {h for write in stages.writes if write in stages.update for h in stages.effects[write].writes}
    for variable in step.variables:
        if variable.handle not in trained and variable.handle in written:
            handles = served.of(variable.handle)
            if len(handles) == 1:
                found[trained[next(iter(handles))]].append(variable)
    return {name: tuple(slots) for name, slots in found.items()}


class ServedVariables:
    """The known variables that the other variables of a step serve, as the slots of an optimizer do.

    Args:
        step: the step.
        stages: its stages.
        known: handles of the known variables.
        gradients: maps tensors that the updates read to the variable that they are the gradient of; by default as
            captured.
        follows_early_reads: True to also follow nodes that are computed only for the part that runs once (from an early
            read of a slot that is written later). After partitioning, such nodes may compute concatenations of all
            shards.
    """

    def __init__(
        self,
        step: Step,
        stages: Stages,
        known: Iterable[str],
        gradients: Mapping[str, str] | None = None,
        follows_early_reads: bool = True,
    ) -> None:
        self._step, self._stages, self._known = step, stages, frozenset(known)
        if gradients is None:
            gradients = {t: g.variable for g in stages.gradients for t in g.tensors}
        self._gradient_of = {t: step.by_name[variable].handle for t, variable in gradients.items()}
        self._read = self._read_by_updates(sorted(stages.once, key=stages.order.__getitem__, reverse=True))
        self._read_early = self._read_by_updates(nodes_for(step, stages.once)) if follows_early_reads else {}

    def of(self, handle: str) -> Handles:
        """Returns the handles of the known variables whose updates read a variable, else of those it is made from."""
        return self._read.get(handle) or self._read_early.get(handle) or self._made_from(handle)

    def written_with(self, handle: str) -> Handles:
        """Returns the handles of the known variables that one op writes together with a variable.

        No gradient reaches such an op if some runs accumulate gradients in variables and others apply them. A branch or
        a function with several ops may write variables of several workers.
        """
        stages, nodes = self._stages, self._step.graph_index.nodes
        written = [stages.effects[write].writes for write in stages.writes if nodes[write].op not in _SEVERAL_OPS]
        return frozenset(h for handles in written if handle in handles for h in handles if h in self._known)

    def _read_by_updates(self, names: Iterable[str]) -> dict[str, Handles]:
        """Maps each variable to the known variables whose writes depend on it; `names` are in reverse order."""
        nodes = self._step.graph_index.nodes
        leads: dict[str, Handles] = {}
        serves: dict[str, Handles] = {}
        for name in names:
            effect = self._stages.effects.get(name)
            reached = leads.get(name, frozenset())
            if effect:
                reached |= effect.writes & self._known
                for handle in effect.reads | effect.writes:
                    serves[handle] = serves.get(handle, frozenset()) | reached
                for handle in effect.writes - self._known:
                    reached |= serves.get(handle, frozenset())
            for i in nodes[name].input:
                if not is_control(i):
                    source = node_of(i)
                    leads[source] = leads.get(source, frozenset()) | reached
        return serves

    def _made_from(self, handle: str) -> Handles:
        """Returns the known variables whose values or gradients the writes of a variable depend on."""
        stages, inputs = self._stages, self._step.graph_index.inputs

        def before(name: str) -> list[str]:
            sources = [node_of(i) for i in inputs(name) if i not in self._gradient_of]
            return [source for source in sources if source in stages.once]

        names = reach((w for w in stages.writes if handle in stages.effects[w].writes), before)
        read = (stages.effects.get(name, NO_EFFECT).reads & self._known for name in names)
        gradients = (self._gradient_of[i] for name in names for i in inputs(name) if i in self._gradient_of)
        return frozenset(gradients).union(*read)
