"""The plan of a session, and the programs of its requests, which are made on first use."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from autodist.batch.examples import warn_empty_micro_batches
from autodist.capture.batch_requirements import require_any_length, require_no_rows_by_position
from autodist.capture.captured_resources import require_unchanged
from autodist.capture.graph_mode import CapturedGraph
from autodist.capture.session_resources import GETS, only_uses_resources, share_resources
from autodist.errors import CaptureError, CaptureMismatchError
from autodist.graph.applied import find_fed_updates
from autodist.graph.editor import GraphEditor
from autodist.graph.find_stages import find_stages, written_handles
from autodist.graph.flows import flows_of, row_axes
from autodist.graph.names import node_of
from autodist.graph.ops import Trait, having
from autodist.graph.parts import Variable
from autodist.graph.step import CapturedStep
from autodist.graph.walks import reach
from autodist.kernels import KERNELS, LOCAL_KERNELS, SETTING_KERNELS, AnyKernel, Fetching, find_holders, only_sets
from autodist.layout import Joined, PerExample, Replicated, Unknown
from autodist.logs.quiet import quiet_tensorflow
from autodist.placement.group import Group
from autodist.placement.holder import Holder
from autodist.proto import strategy_pb2
from autodist.runs.run import Run
from autodist.runtime.program import Program
from autodist.runtime.variables import StoredVariable
from autodist.sessions.batches import require_no_queue
from autodist.sessions.feeds import SessionFeeds, disagree
from autodist.sessions.initial_values import InitialValues
from autodist.synchronizers import all_synchronizers

SESSION = "session"
"""Name of a session's step in the metrics."""


@dataclass(frozen=True)
class Prepared:
    """The run for one structure of fetches and feeds.

    Attributes:
        program: returns the program for one kind of fetching, made on first use; None if all fetches are fed.
        axes: batch axis of each feed.
        sets: True if the run only sets variables.
        trains: True if the run applies gradients.
        is_read_only: True if the run has no gradients and no batch, and so only reads or saves trained values.
        is_global: True if every worker feeds the same batch.
        is_local: True if no other worker takes part, since the run trains nothing and writes nothing.
        has_rows: returns True if each fetch has a row for each example, or does not depend on the examples.
        updates: names of the variables updated from fed gradients, by the fed tensor.
        fetches: outputs that are combined over all workers if all of them make this run.
        is_gathered: True if the workers' feeds are gathered, and the run gets the whole batch.
        row_axes: returns the batch axis of each output; None for an output without rows of examples.
        name: name of the run in the metrics: the operations that it fetches.
    """

    program: Callable[[Fetching], Program] | None
    axes: Sequence[int | None]
    sets: bool
    trains: bool
    is_read_only: bool
    is_global: bool
    is_local: bool
    has_rows: Callable[[], bool]
    updates: Mapping[tf.Tensor, str]
    fetches: Fetches
    is_gathered: bool
    row_axes: Callable[[], Sequence[int | None]]
    name: str


class SessionPrograms:
    """Makes the programs of one session."""

    def __init__(
        self, run: Run, captured: CapturedGraph, feeds: SessionFeeds, plan: SessionPlan, initial_values: InitialValues
    ) -> None:
        self._run, self._captured, self._feeds, self._plan = run, captured, feeds, plan
        self._initial_values = initial_values

    def prepare(self, elements: Sequence[tf.Tensor | tf.Operation], arrays: Mapping[tf.Tensor, np.ndarray]) -> Prepared:
        """Prepares the run of these fetches and feeds; initializes the variables that it needs.

        Raises:
            CaptureError: the run cannot be divided among the replicas.
        """
        outputs = [e.name for e in elements if isinstance(e, tf.Tensor) and e not in arrays]
        got = {t.op.name for t in arrays if t.op.type in GETS}
        targets = [e.name for e in elements if isinstance(e, tf.Operation) and e.name not in got]
        step, axes = self._split(outputs, targets, arrays)
        are_gathered = self._feeds.are_gathered(arrays, axes)
        is_global = are_gathered or self._feeds.are_global(arrays, axes)
        if not is_global and any(axis is not None for axis in axes):
            self._run.spec.require_own_batches()
        step = replace(step, is_global=is_global, rows=self._feeds.fixed_rows(arrays, axes))
        self._require_divisible(step, arrays, axes)
        updates = {} if step.gradients else find_fed_updates(step)
        if updates:
            self._run.on_training()
        sets, is_local = only_sets(step), _is_local(step)
        kernels = self._kernels_of(step, axes, sets)
        if outputs or targets:
            self._initial_values.give_before(step, sets)
        if sets:
            self._initial_values.note_set(step)
        is_staged = bool(self._plan.strategy.pipeline.stages)
        is_common = self._run.workers > 1 and kernels is KERNELS and (is_staged or not is_local)
        fetches = Fetches.of(step, self._plan.strategy) if is_common and step.outputs else Fetches()

        @functools.cache
        def program(fetching: Fetching) -> Program:
            with quiet_tensorflow():
                return self._plan.program(step, kernels, fetching)

        has_program = bool(outputs or targets)
        if has_program and not fetches.shared:
            program(Fetching.BY_EACH)  # now, so that an error comes before this worker's part of the run
        return Prepared(
            program=program if has_program else None,
            axes=axes,
            sets=sets,
            trains=bool(step.gradients),
            is_read_only=not step.gradients and all(axis is None for axis in axes),
            is_global=step.is_global,
            is_local=is_local,
            has_rows=functools.partial(_gives_rows, step),
            updates={t: updates[t.name].name for t in arrays if t.name in updates},
            fetches=fetches,
            is_gathered=are_gathered and (not is_local or bool(fetches.shared)),
            row_axes=functools.partial(row_axes, step),
            name=", ".join(targets) or SESSION,
        )

    def _split(
        self, outputs: Sequence[str], targets: Sequence[str], arrays: Mapping[tf.Tensor, np.ndarray]
    ) -> tuple[CapturedStep, Sequence[int | None]]:
        """Returns the step of a run, and the axis along which each feed is split; None: every replica gets all of it.

        Raises:
            CaptureError: the run reads a queue of batches.
        """
        ranks = {t.name: a.ndim for t, a in arrays.items() if t.shape.rank is None}
        capture = functools.partial(self._captured.step, outputs, targets, ranks=ranks)
        axes = self._feeds.axes_of(arrays, lambda: capture(dict.fromkeys((t.name for t in arrays), None)))
        step = self._plan.placed(capture({t.name: a for t, a in zip(arrays, axes, strict=True)}))
        if disagree(arrays, axes) and _is_local(step):  # each replica computes the whole, as one device does
            axes = [None] * len(axes)
            step = self._plan.placed(capture(dict.fromkeys((t.name for t in arrays), None)))
        require_no_queue(step, len(self._run.spec.replicas))
        return step, axes

    def _require_divisible(
        self, step: CapturedStep, arrays: Mapping[tf.Tensor, np.ndarray], axes: Sequence[int | None]
    ) -> None:
        """Checks that the step accepts the replicas' parts of the feeds.

        Raises:
            CaptureError: it does not.
        """
        division = self._feeds.division(arrays, axes)
        require_no_rows_by_position(step, division)
        require_any_length(step, division)
        if step.gradients:
            warn_empty_micro_batches(division.examples, self._run.spec.micro_batches)

    def _kernels_of(self, step: CapturedStep, axes: Sequence[int | None], sets: bool) -> Sequence[AnyKernel]:
        """Returns the kernels that rewrite a run; `sets` is True if it only sets variables."""
        # On a mesh, a worker may read alone, as to save: it reads the parts where they are.
        reads_parts = self._plan.strategy.HasField("mesh") and _is_local(step) and not any(a is not None for a in axes)
        if sets or reads_parts:
            return SETTING_KERNELS
        if only_uses_resources(step):
            return LOCAL_KERNELS
        if len(self._run.spec.replicas) > 1:
            require_unchanged(step.graph_def, "a run that takes a batch")
        return KERNELS


def _is_local(step: CapturedStep) -> bool:
    """Returns True if no other worker takes part in a run, since it trains nothing and writes nothing."""
    return not step.gradients and not written_handles(step)


def _gives_rows(step: CapturedStep) -> bool:
    """Returns True if each output has a row for each example, or does not depend on the batch."""
    flows = flows_of(step)
    return all(isinstance(flows.kind(name), PerExample | Replicated) for name in step.outputs)


@dataclass(frozen=True)
class Fetches:
    """The outputs of a run that are neither rows of examples nor values that every worker has.

    Attributes:
        shared: outputs that depend on all workers fetching the same: they are combined over all workers, or sent by
            their owners. Equal on all workers.
        own: outputs computed from this worker's examples only, unless they are combined over all workers.
    """

    shared: tuple[str, ...] = ()
    own: tuple[str, ...] = ()

    @classmethod
    def of(cls, step: CapturedStep, strategy: strategy_pb2.Strategy) -> Fetches:
        """Finds the fetches of a run that all workers make."""
        if strategy.pipeline.stages:  # they hold all values of the run
            return cls(step.outputs)
        flows, stages = flows_of(step), find_stages(step)
        own = [
            name for name in step.outputs
            if node_of(name) not in stages.once and isinstance(flows.kind(name), Joined | Unknown)
        ]  # fmt: skip
        if not _is_in_lockstep(strategy):
            return cls(own=tuple(own))
        writes = {name for name, effect in step.graph_index.effects.items() if effect.writes}

        def depends(name: str) -> bool:
            node = node_of(name)
            return node in stages.once or any(
                name in writes for name in reach([node], step.graph_index.sources.__getitem__)
            )

        shared = [name for name in step.outputs if name in own or depends(name)]
        return cls(tuple(shared), tuple(own))


def _is_in_lockstep(strategy: strategy_pb2.Strategy) -> bool:
    """Returns True if some variable's update waits for all workers in every step."""
    synchronies = [synchronizer.synchrony for _, synchronizer in all_synchronizers(strategy)]
    return not synchronies or any(synchrony is None or not synchrony.runs_ahead for synchrony in synchronies)


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
        training = _without_records(whole)
        strategy, renaming = self._run.steps.plan(training, self._names, rehearses=False, name=SESSION)
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
        if self.strategy.HasField("mesh"):
            return self._find_divided(whole)
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

    def _find_divided(self, whole: CapturedStep) -> dict[str, Holder]:
        """Returns the holder of each variable on a mesh."""
        everyone = Group.all_workers(self._run.workers)
        divided = self._run.steps.divided(replace(whole, inputs=_open_inputs(whole)), self.strategy, self._names)
        return {v.name: divided.get(v.name, Holder.whole(v.shape, everyone)) for v in whole.variables}

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


_RECORDS = re.compile("Summary|SaveV2|RestoreV2|MergeV2Checkpoints|ShardedFilename")
_INPUTS = having(Trait.IDENTITY | Trait.SOURCE | Trait.FED) | {"ReadVariableOp"}
"""Ops that compute nothing by themselves, as the inputs of savers and summaries."""


def _without_records(whole: CapturedStep) -> CapturedStep:
    """Returns a graph without summaries and savers, which the chief alone may have."""
    graph = whole.graph_index
    restoring = reach((node.name for node in graph.of_op("RestoreV2")), graph.consumers.__getitem__)
    handles = {variable.handle for variable in whole.variables}
    writes = [name for name, one in graph.effects.items() if handles & one.writes and name not in restoring]
    editor = GraphEditor(whole.graph_def)
    needed = editor.ancestors([*writes, *whole.named])
    records = [node.name for node in graph.nodes.values() if _RECORDS.search(node.op)]
    editor.remove(reach(records, graph.consumers.__getitem__) - needed)
    editor.remove_unread(editor.names, lambda node: node.op not in _INPUTS or node.name in needed)
    editor.drop_lost_colocation()
    return replace(whole, graph_def=editor.to_graph_def())


def _open_inputs(whole: CapturedStep) -> dict[str, int | None]:
    """Returns the placeholders of a graph whose first axis is open, which is that of the examples."""
    shapes = {n.name: tf.TensorShape(n.attr["shape"].shape) for n in whole.graph_index.of_op("Placeholder")}
    return {f"{name}:0": 0 for name, shape in shapes.items() if shape.rank and shape[0] is None}
