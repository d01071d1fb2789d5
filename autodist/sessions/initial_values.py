"""Values of a session's variables before training: from a checkpoint, or initial values.

Variables that the script never sets, for example because it runs no initializer, get their initial values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from autodist.capture.graph_mode import CapturedGraph, initializers_of
from autodist.checkpoint.slices import restore_session
from autodist.graph.control_flow import find_maybe_dead
from autodist.graph.editor import NodeDef
from autodist.graph.index import GraphIndex
from autodist.graph.ops import Trait
from autodist.graph.parts import Variable
from autodist.graph.step import CapturedStep
from autodist.graph.walks import reach
from autodist.kernels import KERNELS, SETTING_KERNELS, AnyKernel
from autodist.logs.formatting import some_of
from autodist.runs.run import Run
from autodist.runtime.program import Program
from autodist.runtime.variables import StoredVariable

log = logging.getLogger("autodist")


class InitialValues:
    """Initializes variables that no run has set, before the first run that reads any.

    All workers have made the same setting runs by then, so they agree on the unset variables, even if their next runs
    differ. The chief then sets the variables on all workers.

    Args:
        run: the run.
        captured: the session's graph.
        make_program: makes a program of a run of the graph.
        settled: handles of variables that have values; updated in place.
    """

    def __init__(
        self,
        run: Run,
        captured: CapturedGraph,
        make_program: Callable[[CapturedStep, Sequence[AnyKernel]], Program],
        settled: set[str],
    ) -> None:
        self._run, self._captured, self._make_program = run, captured, make_program
        self._initializers = initializers_of(captured.graph)
        self.settled = settled

    def note_set(self, step: CapturedStep) -> None:
        """Records the variables that a run sets."""
        for effect in step.graph_index.effects.values():
            self.settled |= effect.writes

    def give_before(self, step: CapturedStep, sets: bool) -> None:
        """Initializes unset variables, if a run needs values of variables.

        Args:
            step: the run.
            sets: True if it only sets variables. It then needs only those that it reads before it assigns them.
        """
        if not step.graph_index.effects:
            return
        unset = self._initializers.keys() - self.settled
        if unset and (not sets or not unset.isdisjoint(_read_before_assigned(step.graph_index))):
            self.give()

    def give(self) -> None:
        """Initializes unset variables; all workers call it."""
        unset = self._initializers.keys() - self.settled
        if not unset:
            return
        self.settled |= unset
        self._run.coordination.flush_for_chief()
        if self._run.index == 0:
            self._give(unset)
        self._run.coordination.wait_for_chief()

    def _give(self, handles: Set[str]) -> None:
        variables = [v for v in self._captured.variables if v.handle in handles]
        have = self._run.guard(self._make_program(self._initialized_checks(variables), KERNELS).run, [], 0)
        lacking = [v for v, has in zip(variables, have, strict=True) if not has]
        if lacking:
            setting = self._captured.step([], [self._initializers[v.handle] for v in lacking], {})
            self._run.guard(self._make_program(setting, SETTING_KERNELS).run, [], 0)
            log.info(
                "no run of the session has set %s; variables that the script does not set have their initial values.",
                some_of([v.name for v in lacking], most=4),
            )  # fmt: skip

    def _initialized_checks(self, variables: Iterable[Variable]) -> CapturedStep:
        """Returns a run that checks for each variable if it has a value."""
        handles = {f"autodist/has_value/{v.handle}": v.handle for v in variables}
        nodes = {f"{name}:0": NodeDef(name=name, op="VarIsInitializedOp", input=[h]) for name, h in handles.items()}
        return self._captured.step_of_nodes(nodes, handles.values())


def _read_before_assigned(graph_index: GraphIndex) -> set[str]:
    """Returns the handles of variables that a run reads, outside of branches, before it assigns them."""
    perhaps = find_maybe_dead(graph_index).union(node.name for node in graph_index.having(Trait.BRANCH | Trait.LOOP))
    assigned: dict[str, set[str]] = {}
    for name, effect in graph_index.effects.items():
        for handle in effect.writes - effect.reads:
            assigned.setdefault(handle, set()).add(name)
    handles = set()
    for name, effect in graph_index.effects.items():
        if effect.reads and name not in perhaps:
            before = reach([name], graph_index.sources.__getitem__)
            handles |= {handle for handle in effect.reads if assigned.get(handle, set()).isdisjoint(before)}
    return handles


def resume(run: Run, variables: Mapping[str, StoredVariable]) -> None:
    """Restores a session's variables from the checkpoint that the run resumes from, before the first training run.

    All workers call it; each reads the slices of variables that it holds.
    """
    restored = run.observer.on_session(variables)
    if not run.resumed:
        return
    run.coordination.flush_for_chief()
    if run.index == 0:
        restore_session(run, run.resumed["prefix"], restored.items())
    run.coordination.wait_for_chief()
