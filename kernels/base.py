"""Kernel: a graph-to-graph pass, and what it may know of the run."""

from __future__ import annotations

import enum
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist.errors import RewriteError
from autodist.graph.devices import cpu_of, home_of, task_of
from autodist.graph.origins import origins_in
from autodist.graph.parts import PendingReduction
from autodist.graph.step import Step
from autodist.kernels.plan import Plan
from autodist.proto import strategy_pb2
from autodist.synchronizers import Subgroups


class Fetching(enum.Enum):
    """Which workers fetch the outputs of a step, and over whose replicas means, sums and the like are joined."""

    BY_ALL = enum.auto()
    """All workers fetch the same outputs, joined over all workers: functions, Keras, runs of a session made alike."""

    BY_EACH = enum.auto()
    """Workers may fetch different outputs, joined over each worker's own replicas: other runs of a session."""


@dataclass(frozen=True)
class Context:
    """For whom the graph is rewritten: one worker of a run.

    Attributes:
        strategy: the plan, the same on all workers.
        worker: index of the worker whose graph this is.
        fetching: which workers fetch what the step returns.
    """

    strategy: strategy_pb2.Strategy
    worker: int
    fetching: Fetching = Fetching.BY_ALL

    @functools.cached_property
    def plan(self) -> Plan:
        """What the strategy says of each variable and shard."""
        return Plan(self.strategy)

    @property
    def joins_outputs(self) -> bool:
        """Whether all workers fetch the same outputs, so that these are joined over all workers."""
        return self.fetching is Fetching.BY_ALL

    @property
    def replicas(self) -> Sequence[strategy_pb2.Replica]:
        return self.strategy.graph_config.replicas

    @functools.cached_property
    def workers(self) -> int:
        """How many workers there are, those without replicas included."""
        return self.strategy.graph_config.workers or 1 + max(r.worker for r in self.replicas)

    @functools.cached_property
    def computing(self) -> tuple[int, ...]:
        """The workers that have replicas; the others own variables, and see what all see."""
        return tuple(sorted({r.worker for r in self.replicas}))

    @functools.cached_property
    def teams(self) -> Subgroups | None:
        """The teams that add up by themselves first; None: all workers add up together."""
        return Subgroups.of(self.strategy.graph_config.teams, self.computing)

    def adds_in_teams(self, join: PendingReduction) -> bool:
        """Whether a join is added up within teams first."""
        return self.teams is not None and self.plan.in_teams(join)

    @property
    def computes(self) -> bool:
        """Whether this worker has replicas."""
        return bool(self.local_replicas)

    @property
    def all_compute(self) -> bool:
        """Whether no worker is without replicas."""
        return len(self.computing) == self.workers

    @functools.cached_property
    def local_replicas(self) -> tuple[int, ...]:
        """Global indices of this worker's replicas."""
        return tuple(k for k, r in enumerate(self.replicas) if r.worker == self.worker)

    @property
    def copied_replicas(self) -> tuple[int, ...]:
        """Global indices of the replicas that this worker's graph holds.

        Where it has none, the first stands in, so that the graph has on all workers the same shape until what it
        computes is left out (`LeaveOutCompute`).
        """
        return self.local_replicas or (0,)

    @property
    def is_alone(self) -> bool:
        """Whether there is one replica in all and no other worker, so that nothing is to be combined."""
        return len(self.replicas) == 1 and self.workers == 1

    @property
    def has_one_kind_of_processor(self) -> bool:
        """Whether all workers are known to compute the same bits, whatever code is made for their processors."""
        return self.workers == 1 or self.strategy.graph_config.one_machine

    @functools.cached_property
    def of_replicas(self) -> Context:
        """The context in which the step is replicated: for a pipeline, as if there were one worker.

        The micro-batches of a pipeline count as replicas of one worker, until `PlaceStages` deals out who computes
        what.
        """
        alone = strategy_pb2.Strategy()
        alone.CopyFrom(self.strategy)
        alone.graph_config.workers = 0
        return Context(alone, 0)

    def goes_through_stages(self, item: Step) -> bool:
        """Whether a step goes through the stages of a pipeline, if there is one: whatever trains or takes a batch."""
        takes_a_batch = any(axis is not None for axis in item.inputs.values())
        return bool(self.plan.stages) and (bool(item.gradients) or takes_a_batch)

    @functools.cached_property
    def seat(self) -> tuple[int, int]:
        """This worker's pipeline stage, and its place among those of the stage."""
        return next(
            (stage, workers.index(self.worker))
            for stage, workers in enumerate(self.plan.seats) if self.worker in workers
        )  # fmt: skip

    def near(self, owner: int) -> int:
        """The worker that has for this one what `owner` owns: of several that hold the same, that of its pipeline."""
        stage_group = self.plan.stage_group.get(owner)
        return (owner, *stage_group)[self.seat[1]] if stage_group else owner

    def task(self, worker: int) -> str:
        """The TensorFlow device prefix of a worker."""
        return task_of(worker, self.workers)

    def cpu(self, worker: int) -> str:
        """The CPU of a worker."""
        return cpu_of(worker, self.workers)

    def home(self, worker: int, dtype: tf.DType) -> str:
        """The device on which a worker keeps a variable."""
        return home_of(worker, self.workers, self.first_device(worker), dtype)

    def first_device(self, worker: int) -> str:
        """The device of a worker's first replica; its CPU, where it has none."""
        return self._first_devices.get(worker, "cpu:0")

    @functools.cached_property
    def _first_devices(self) -> dict[int, str]:
        found = {one.worker: one.device for stage in self.strategy.pipeline.stages for one in (stage, *stage.beside)}
        for replica in self.replicas:
            found.setdefault(replica.worker, replica.device)
        return found


class Kernel(ABC):
    """A pass: valid graph in, valid graph out, the input untouched.

    A kernel is a frozen dataclass whose options are its fields.
    """

    name: ClassVar[str]

    @abstractmethod
    def apply(self, item: Step, context: Context) -> Step:
        """Returns the rewritten step.

        Raises:
            StrategyError: if the strategy asks for what this kernel cannot do.
            RewriteError: if the step cannot be rewritten without changing what is trained.
        """


def _required(made: object) -> Step:
    if isinstance(made, Step):
        return made
    raise RewriteError(
        f"apply returned {made!r} and no step: let it return the one that it is given, or what to_item() of a "
        "StepEditor gives"
    )


Watcher = Callable[[str, Step], None]


def run_pipeline(kernels: Sequence[Kernel], item: Step, context: Context, watch: Watcher | None = None) -> Step:
    """Applies the kernels in order; `watch(name, item)` is called with the captured step and after each kernel.

    An error gets notes of the kernel that it comes from, and of the lines of the script that made the nodes which it
    names.
    """
    if watch:
        watch("captured", item)
    for kernel in kernels:
        try:
            item = _required(kernel.apply(item, context))
        except Exception as error:
            for note in origins_in(str(error), item.origin_of):
                error.add_note(note)
            error.add_note(f"in the kernel {kernel.name}, for worker {context.worker}")
            raise
        if watch:
            watch(kernel.name, item)
    return item
