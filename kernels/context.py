"""The context of a run that kernels read: the worker, its places and replicas, and the strategy."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from autodist.graph.devices import cpu_of, home_of, task_of
from autodist.graph.parts import PendingReduction
from autodist.graph.step import Step
from autodist.kernels.plan import Plan
from autodist.placement.group import Group, Place, worker_count
from autodist.placement.placement import Placement
from autodist.proto import strategy_pb2
from autodist.sharding import Mesh
from autodist.synchronizers import Subgroups, mesh_of, row_axes_of, with_owners_in_row


class Fetching(enum.Enum):
    """The workers that fetch the outputs of a step, and the replicas over which these are reduced."""

    BY_ALL = enum.auto()
    """All workers fetch the same outputs, reduced over all workers: functions, Keras, identical session runs."""

    BY_EACH = enum.auto()
    """Workers may fetch different outputs, reduced over each worker's replicas only: all other session runs."""


@dataclass(frozen=True)
class Context:
    """The worker for which a graph is rewritten, and the strategy.

    Attributes:
        strategy: the same on all workers.
        worker: index of the worker that runs the rewritten graph.
        fetching: the workers that fetch the outputs of the step.
        outer_steps: the key of the outer step that averages a variable in a program of an earlier step, by the name of
            the variable in the session.
    """

    strategy: strategy_pb2.Strategy
    worker: int
    fetching: Fetching = Fetching.BY_ALL
    outer_steps: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def plan(self) -> Plan:
        """The strategy, resolved for each variable and shard; on a mesh, in the row of this worker."""
        if self.mesh is None:
            return Plan(self.strategy)
        return Plan(with_owners_in_row(self.strategy, [place.worker for place in self.row]))

    @property
    def placement(self) -> Placement:
        """The groups that hold the variables and compute the pipeline stages."""
        return self.plan.placement

    @property
    def reduces_outputs(self) -> bool:
        """True if all workers fetch the same outputs, so that outputs are reduced over all workers."""
        return self.fetching is Fetching.BY_ALL

    @functools.cached_property
    def replicas(self) -> Sequence[strategy_pb2.Replica]:
        """The replicas among which this worker's batch is divided; on a mesh, those of its row along the data axis.

        The micro-batches of a pipeline on a mesh are those of the first place of the row.
        """
        if self.mesh is None:
            return self.strategy.graph_config.replicas
        return self.row[:1] * len(self.strategy.graph_config.replicas) if self.has_stages_on_mesh else self.row

    @functools.cached_property
    def row(self) -> list[strategy_pb2.Replica]:
        """The places of the mesh that compute on the same slices as this worker, or its pipeline on these slices."""
        return [self.strategy.mesh.places[place] for place in self.mesh_row]

    @property
    def has_stages_on_mesh(self) -> bool:
        """True if each row of the mesh is a pipeline."""
        return self.mesh is not None and bool(self.strategy.pipeline.stages)

    @property
    def row_axes(self) -> list[str]:
        """The axes of the mesh along which places compute on the same slices: of the stages and of the batch."""
        return row_axes_of(self.strategy)

    @functools.cached_property
    def mesh(self) -> Mesh | None:
        """The mesh over which tensors are divided; None if they are not."""
        return mesh_of(self.strategy) if self.strategy.HasField("mesh") else None

    @functools.cached_property
    def mesh_row(self) -> tuple[int, ...]:
        """The positions of the places in `row`, in the order of the axes of the stages and of the batch."""
        return self._row_of(self.coordinates[0])

    @functools.cached_property
    def coordinates(self) -> tuple[int, ...]:
        """A place of this worker for each of its coordinates on the axes other than that of the batch, in order.

        They have the first of this worker's coordinates on the axis of the batch.
        """
        places = [k for k, place in enumerate(self.strategy.mesh.places) if place.worker == self.worker]
        first = self._row_of(places[0])
        return (places[0], *(place for place in places if self._row_of(place) != first and self._is_first(place)))

    @property
    def model_axes(self) -> list[str]:
        """The axes of the mesh other than those of the stages and of the batch: they divide tensors."""
        return [name for name in self.mesh.names if name not in self.row_axes] if self.mesh is not None else []

    def place_of(self, replica: int, coordinate: int) -> int:
        """Returns the place of a local replica and of a coordinate of this worker, by their positions."""
        if self.has_stages_on_mesh:  # it has one place, for all micro-batches
            return self.coordinates[coordinate]
        return self._row_of(self.coordinates[coordinate])[self.local_replicas[replica]]

    def _row_of(self, place: int) -> tuple[int, ...]:
        assert self.mesh is not None, "only a mesh has rows"
        return self.mesh.row(place, self.row_axes)

    def _is_first(self, place: int) -> bool:
        """Returns True if a place is the first one of this worker in its row along the axis of the batch."""
        places = self.strategy.mesh.places
        return place == next(other for other in self._row_of(place) if places[other].worker == self.worker)

    @property
    def places(self) -> int:
        """The number of devices of all workers; each is a place of a mesh."""
        return len(self.strategy.mesh.places) or len(self.strategy.graph_config.replicas)

    @functools.cached_property
    def workers(self) -> int:
        """The number of workers, including those without replicas."""
        return worker_count(self.strategy.graph_config)

    @functools.cached_property
    def group(self) -> Group:
        """The group of all replicas. Workers without replicas only own variables.

        On a mesh, it is the group of those that compute on the same slices.
        """
        if self.mesh is None:
            return Group.of_run(self.strategy.graph_config)
        places = tuple(Place(place.worker, place.device) for place in self.replicas)
        return Group(places, tuple(one.worker for one in self.row[1:]) if self.has_stages_on_mesh else ())

    @functools.cached_property
    def row_group(self) -> Group:
        """The group of the places in `row`, which hold the same parts of variables."""
        return Group(tuple(Place(place.worker, place.device) for place in self.row))

    def subgroups(self, pending: PendingReduction) -> Subgroups | None:
        """Returns the subgroups within which a value is reduced first; None if its group reduces it at once."""
        return self._subgroups_of(pending.group) if self.plan.uses_subgroups(pending) else None

    @functools.cached_property
    def _subgroups_of(self) -> Callable[[Group], Subgroups | None]:
        return functools.cache(functools.partial(Subgroups.of, self.strategy.graph_config.subgroups))

    @property
    def computes(self) -> bool:
        """True if this worker has replicas."""
        return self.worker in self.group

    @property
    def all_compute(self) -> bool:
        """True if every worker has replicas."""
        return not self.group.receivers

    @property
    def local_replicas(self) -> tuple[int, ...]:
        """Global indices of this worker's replicas."""
        return self.group.ranks(self.worker)

    @property
    def copied_replicas(self) -> tuple[int, ...]:
        """Global indices of the replicas that this worker's graph holds.

        A worker without replicas holds the first one: its graph has the same structure as on other workers until
        `RemoveCompute` removes the compute part.
        """
        return self.local_replicas or (0,)

    @property
    def single_replica(self) -> bool:
        """True if there is a single replica and no other worker, so that nothing is reduced."""
        return self.group.size == 1 and not self.group.receivers

    @property
    def has_one_kind_of_processor(self) -> bool:
        """True if all workers are known to compute bit-identical results, whatever code their processors run."""
        return self.workers == 1 or self.strategy.graph_config.one_machine

    def compilation(self, step: Step) -> strategy_pb2.Compilation:
        """Returns what XLA compiles of a step: as the strategy sets it, or else as the script requests."""
        if self.strategy.graph_config.HasField("compilation"):
            return self.strategy.graph_config.compilation
        if step.jit_compile:
            return strategy_pb2.Compilation(computation=strategy_pb2.Compilation.WHOLE, updates=True)
        marked = strategy_pb2.Compilation.MARKED
        return strategy_pb2.Compilation(computation=marked)

    @functools.cached_property
    def of_replicas(self) -> Context:
        """The context in which the step is replicated: for a pipeline, that of a single worker.

        The micro-batches of a pipeline count as replicas of one worker until `PlaceStages` assigns nodes to workers.
        """
        alone = strategy_pb2.Strategy()
        alone.CopyFrom(self.strategy)
        alone.graph_config.workers = 0
        alone.ClearField("mesh")  # the step is that of a row
        return Context(alone, 0)

    def goes_through_stages(self, step: Step) -> bool:
        """Returns True if there is a pipeline and the step runs in its stages: the step trains or takes a batch."""
        return bool(self.placement.stages.groups and (step.gradients or step.batch_axes))

    def nearest_holder(self, group: Group) -> int:
        """Returns the worker of a group from which this worker reads: the only one, or the one of its pipeline."""
        if self.mesh is not None:
            return self.worker if self.worker in group else group.workers[0]
        return group.workers[self.placement.stages.rank_of(self.worker)[1] if len(group.workers) > 1 else 0]

    def task(self, worker: int) -> str:
        """Returns the TensorFlow device prefix of a worker."""
        return task_of(worker, self.workers)

    def cpu(self, worker: int) -> str:
        """Returns the CPU of a worker."""
        return cpu_of(worker, self.workers)

    def home(self, worker: int, dtype: tf.DType, device: str | None = None) -> str:
        """Returns the device on which a worker stores a variable, or a slice of one that is on the device `device`."""
        return home_of(worker, self.workers, device or self.first_device(worker), dtype)

    def first_device(self, worker: int) -> str:
        """Returns the device of a worker's first replica, or its CPU if it has none."""
        return self._first_devices.get(worker, "cpu:0")

    @functools.cached_property
    def _first_devices(self) -> dict[int, str]:
        devices = {
            one.worker: one.device for stage in self.strategy.pipeline.stages for one in (stage, *stage.stage_group)
            if self.mesh is None
        }  # fmt: skip
        for replica in (*self.replicas, *self.strategy.mesh.places):
            devices.setdefault(replica.worker, replica.device)
        return devices
