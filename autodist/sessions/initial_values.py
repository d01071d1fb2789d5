"""Initial values of variables that a session's script never sets, as one that never runs an initialiser."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence, Set

from autodist.capture.graph_mode import CapturedGraph, initializers_of
from autodist.graph.control_flow import find_perhaps_dead
from autodist.graph.editor import NodeDef
from autodist.graph.index import GraphIndex
from autodist.graph.ops import Trait
from autodist.graph.parts import Variable
from autodist.graph.step import Step
from autodist.graph.walks import reach
from autodist.kernels import KERNELS, SETTING_KERNELS, Kernel
from autodist.runs.run import Run
from autodist.runtime.program import Program

log = logging.getLogger("autodist")

_MOST_NAMES = 4
"""Of variables that are told by name."""


class InitialValues:
    """Gives variables that no run has set their initial values, before the first run that reads any.

    All workers have made the same setting runs by then, so that they agree on whether a variable is unset, though what
    they run first may differ. The chief then sets the variables everywhere.

    Args:
        run: in which the session runs.
        captured: the session's graph.
        make_program: makes a run of it.
        settled: handles of variables that have values already; those that get one are added.
    """

    def __init__(
        self,
        run: Run,
        captured: CapturedGraph,
        make_program: Callable[[Step, Sequence[Kernel]], Program],
        settled: set[str],
    ) -> None:
        self._run, self._captured, self._make_program = run, captured, make_program
        self._initializers = initializers_of(captured.graph)
        self.settled = settled

    def note_set(self, item: Step) -> None:
        """Notes the variables that a run sets."""
        for effect in item.graph_index.effects.values():
            self.settled |= effect.writes

    def give_before(self, item: Step, sets: bool) -> None:
        """Gives what is unset its initial value, if a run needs values of variables.

        Args:
            item: the run.
            sets: whether it only sets variables. It then needs the values that it reads as it finds them.
        """
        if not item.graph_index.effects:
            return
        unset = self._initializers.keys() - self.settled
        if unset and (not sets or not unset.isdisjoint(_read_as_found(item.graph_index))):
            self.give()

    def give(self) -> None:
        """Gives what is unset its initial value; all workers call it."""
        unset = self._initializers.keys() - self.settled
        if not unset:
            return
        self.settled |= unset
        self._run.coordination.meet()
        if self._run.index == 0:
            self._give(unset)
        self._run.coordination.wait_for_chief()

    def _give(self, handles: Set[str]) -> None:
        variables = [v for v in self._captured.variables if v.handle in handles]
        have = self._run.guard(self._make_program(self._questions(variables), KERNELS).run, [], 0)
        lacking = [v for v, has in zip(variables, have, strict=True) if not has]
        if lacking:
            setting = self._captured.step([], [self._initializers[v.handle] for v in lacking], {})
            self._run.guard(self._make_program(setting, SETTING_KERNELS).run, [], 0)
            log.info(
                "no run of the session has set %s; what no script sets has its initial value.",
                _told([v.name for v in lacking]),
            )  # fmt: skip

    def _questions(self, variables: Iterable[Variable]) -> Step:
        """A run that asks of each variable whether it has a value."""
        asked = {f"autodist/has_value/{v.handle}": v.handle for v in variables}
        nodes = {f"{name}:0": NodeDef(name=name, op="VarIsInitializedOp", input=[h]) for name, h in asked.items()}
        return self._captured.having(nodes, asked.values())


def _read_as_found(graph_index: GraphIndex) -> set[str]:
    """The handles of variables that a run reads, outside of branches, before it assigns them."""
    perhaps = find_perhaps_dead(graph_index).union(node.name for node in graph_index.having(Trait.BRANCH | Trait.LOOP))
    assigned: dict[str, set[str]] = {}
    for name, effect in graph_index.effects.items():
        for handle in effect.writes - effect.reads:
            assigned.setdefault(handle, set()).add(name)
    found = set()
    for name, effect in graph_index.effects.items():
        if effect.reads and name not in perhaps:
            before = reach([name], graph_index.sources.__getitem__)
            found |= {handle for handle in effect.reads if assigned.get(handle, set()).isdisjoint(before)}
    return found


def _told(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
