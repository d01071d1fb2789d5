"""Plan of a session: the strategy and the holders for its graph, and its rewritten runs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autodist.capture.graph_mode import CapturedGraph
from autodist.capture.session_resources import share_resources
from autodist.errors import CaptureError, CaptureMismatchError
from autodist.graph.parts import Variable
from autodist.graph.step import CapturedStep
from autodist.kernels import AnyKernel, Fetching, find_holders
from autodist.placement.group import Group
from autodist.placement.holder import Holder
from autodist.proto import strategy_pb2
from autodist.runs.run import Run
from autodist.runtime.program import Program
from autodist.runtime.variables import StoredVariable

_COUNT = itertools.count()
"""Counter of this process's sessions; all workers make theirs in the same order."""


class SessionPlan:
    """The plan of one session.

    Args:
        run: the run.
        captured: the session's graph.
        whole: the complete graph, with its gradients.
        earlier: plan of an earlier session of the same graph, whose values are shared; None for separate values.

    Raises:
        CaptureError: a variable needs another holder than in the earlier session.
        CaptureMismatchError: another worker has built another graph.
        StrategyError: the strategy is not possible for this graph.
    """

    def __init__(self, run: Run, captured: CapturedGraph, whole: CapturedStep, earlier: SessionPlan | None) -> None:
        self._run = run
        # Each session has its own values, as in TensorFlow.
        self._prefix: str = f"session_{next(_COUNT)}" if earlier is None else earlier._prefix
        self._names = {v.name: f"{self._prefix}/{v.handle}" for v in captured.variables}
        self.strategy = self._agree(whole)
        self._holders: Mapping[str, Holder] = self._find_holders(whole, {} if earlier is None else earlier._holders)

    def _agree(self, whole: CapturedStep) -> strategy_pb2.Strategy:
        strategy, renaming = self._run.steps.plan(whole, self._names, rehearses=False)
        for own, chiefs in [*renaming.variables.items(), *renaming.nodes.items()][:1]:
            raise CaptureMismatchError(
                f"worker {self._run.index} has {own} in its session's graph where the chief has {chiefs}: TensorFlow "
                "numbers equal names, so one of the two graphs has nodes that the other does not have. Build the same "
                "graph on every worker."
            )
        return strategy

    def _find_holders(self, whole: CapturedStep, earlier: Mapping[str, Holder]) -> dict[str, Holder]:
        """Returns the holder of each variable; variables of an earlier session keep theirs.

        Raises:
            CaptureError: the strategy needs another holder for a variable, which no step trained before.
        """
        if self._run.workers == 1:
            return {}
        holders = find_holders(replace(whole, holders=earlier), self.strategy)
        wanted = find_holders(whole, self.strategy) if earlier else holders
        for node in self.strategy.nodes:
            if wanted[node.variable] != holders[node.variable]:
                raise CaptureError(
                    f"{node.variable} is trained by a step that was called after one which only reads it, when every "
                    "worker had it already, and the strategy gives it an owner. Call the step that trains it first, or "
                    "use AllReduce, or build the graph of all steps and run it with create_distributed_session()."
                )
        return holders

    def placed(self, step: CapturedStep) -> CapturedStep:
        """Returns a run of the graph, with the holders of its variables."""
        return replace(step, holders=self._holders)

    def stored(self, variable: Variable) -> StoredVariable:
        """Returns one of its variables as the session stores it."""
        holder = self._holders.get(variable.name) or Holder.whole(variable.shape, Group.all_workers(self._run.workers))
        return StoredVariable(self._names[variable.name], variable.dtype, tuple(variable.shape), holder)

    def program(
        self, step: CapturedStep, kernels: Sequence[AnyKernel], fetching: Fetching = Fetching.BY_EACH
    ) -> Program:
        """Rewrites a run of the graph for this worker.

        Raises:
            FetchedElsewhereError: workers may fetch different outputs, and one is computed on other workers.
        """
        shared = share_resources(step, self._prefix)
        return self._run.steps.program(shared, self.strategy, self._names, fetching, kernels)[0]
