"""The order of the kernels, and the debugging output of their application."""

from __future__ import annotations

import gc
import logging
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import tensorflow as tf

from autodist.graph.step import CapturedStep, PlacedStep, Step
from autodist.graph.step_text import text_of_notes, text_of_step
from autodist.graph.verify import verify
from autodist.kernels.base import AnyKernel, Context, Watcher, in_order, run_pipeline
from autodist.kernels.communicate.asynchronous_servers import AsynchronousServers
from autodist.kernels.communicate.average_local_steps import AverageLocalSteps
from autodist.kernels.communicate.parameter_servers import ParameterServers
from autodist.kernels.communicate.read_cached_copies import ReadCachedCopies
from autodist.kernels.communicate.reduce_by_collective import ReduceByCollective
from autodist.kernels.communicate.reduce_by_shuffle import ReduceByShuffle
from autodist.kernels.communicate.send_layers import SendLayers
from autodist.kernels.communicate.set_sync_mode import SetSyncMode
from autodist.kernels.communicate.stale_servers import StaleServers
from autodist.kernels.finish.call_units import CallUnits
from autodist.kernels.finish.compile_step import CompileStep
from autodist.kernels.finish.compile_updates import CompileUpdates
from autodist.kernels.finish.multiply_before_loops import MultiplyBeforeLoops
from autodist.kernels.finish.place_on_devices import PlaceOnDevices
from autodist.kernels.finish.prune import Prune
from autodist.kernels.finish.remove_compute import RemoveCompute
from autodist.kernels.finish.sum_after_loops import SumAfterLoops
from autodist.kernels.finish.transpose_before_loops import TransposeBeforeLoops
from autodist.kernels.normalise.assign_scattered_state import AssignScatteredState
from autodist.kernels.normalise.inline_branches import InlineBranches
from autodist.kernels.normalise.reduce_before_postprocessing import ReduceBeforePostprocessing
from autodist.kernels.normalise.settle_losses import SettleLosses
from autodist.kernels.normalise.settle_sums import SettleSums
from autodist.kernels.normalise.split_bundles import SplitBundles
from autodist.kernels.pipelined.assign_stages import AssignStages
from autodist.kernels.pipelined.place_stages import PlaceStages
from autodist.kernels.place.assign_owners import AssignOwners
from autodist.kernels.place.gather_layers import GatherLayers
from autodist.kernels.place.partition import PartitionVariables
from autodist.kernels.place.read_remote_variables import ReadRemoteVariables
from autodist.kernels.place.set_by_chief import SetByChief
from autodist.kernels.registry import with_registered
from autodist.kernels.replicate.advance_generators import AdvanceGenerators
from autodist.kernels.replicate.recompute_blocks import RecomputeBlocks
from autodist.kernels.replicate.replicate import Replicate
from autodist.kernels.rows.add_rows_in_order import AddRowsInOrder
from autodist.kernels.rows.choose_row_joins import ChooseRowJoins
from autodist.kernels.rows.merge_rows import MergeRows
from autodist.kernels.rows.report_table_writes import ReportTableWrites
from autodist.kernels.rows.rewrite_rows import RewriteRows
from autodist.kernels.shard.add_data_flow_edges import AddDataFlowEdges
from autodist.kernels.shard.apply_constraints import ApplyConstraints
from autodist.kernels.shard.complete_manual_regions import CompleteManualRegions
from autodist.kernels.shard.constrain_tensors import ConstrainTensors
from autodist.kernels.shard.copy_for_places import CopyForPlaces
from autodist.kernels.shard.holders import HoldInRows, HoldOnMesh, holders_on_mesh
from autodist.kernels.shard.lift_meshes import LiftMeshes
from autodist.kernels.shard.lower_reshards import LowerReshards
from autodist.kernels.shard.remove_size_one_axes import RemoveSizeOneAxes
from autodist.kernels.shard.shard_tensors import ShardTensors
from autodist.kernels.shard.signal_parts import SignalParts
from autodist.kernels.shard.split_constants import SplitConstants
from autodist.kernels.shard.unite_groups import UniteGroups
from autodist.placement.holder import Holder
from autodist.sharding import Sharding

log = logging.getLogger("autodist")

DUMP_VARIABLE = "AUTODIST_DUMP"
"""Environment variable that names a folder; the graph after each kernel is written to it, for TensorBoard."""

IMPORT_PASSES: tuple[AnyKernel, ...] = (
    ConstrainTensors(),
    LiftMeshes(),
    RemoveSizeOneAxes(),
    SplitConstants(),
    CompleteManualRegions(),
    AddDataFlowEdges(),
    ApplyConstraints(),
    UniteGroups(),
)
"""The passes that bring annotations into the form in which they propagate; they return a step without annotations as
it is.
"""

KERNELS: tuple[AnyKernel, ...] = in_order(
    InlineBranches(),
    SplitBundles(),
    SettleLosses(),
    SettleSums(),
    ReduceBeforePostprocessing(),
    AssignScatteredState(),
    RewriteRows(),
    ReportTableWrites(),
    ChooseRowJoins(),
    *IMPORT_PASSES,
    HoldInRows(),
    AssignOwners(),
    ShardTensors(),
    CopyForPlaces(),
    GatherLayers(),
    PartitionVariables(),
    AddRowsInOrder(),
    AdvanceGenerators(),
    AssignStages(),
    Replicate(),
    RecomputeBlocks(),
    PlaceStages(),
    SignalParts(),
    SetSyncMode(),
    AverageLocalSteps(),
    SendLayers(),
    ReadCachedCopies(),
    MergeRows(),
    ReduceByShuffle(),
    ReduceByCollective(),
    AsynchronousServers(),
    StaleServers(),
    ParameterServers(),
    LowerReshards(),
    RemoveCompute(),
    Prune(),
    ReadRemoteVariables(),
    PlaceOnDevices(),
    CompileStep(),
    MultiplyBeforeLoops(),
    SumAfterLoops(),
    TransposeBeforeLoops(),
    CompileUpdates(),
    CallUnits(),
    HoldOnMesh(),
)
"""The kernels of a step in order.

The import fails if a kernel gets another phase than it takes, or runs before a kernel that it must run after.
"""


@dataclass
class Watch:
    """Logs the duration of each kernel, and dumps the step after it if `AUTODIST_DUMP` is set.

    Attributes:
        name: of the step.
        worker: the worker that runs the step.
        folder: the output folder; None: no dump.
    """

    name: str
    worker: int
    folder: str | None = field(default_factory=lambda: os.environ.get(DUMP_VARIABLE))
    _captured: Step | None = None
    _count: int = 0
    _since: float = field(default_factory=time.perf_counter)

    def __call__(self, kernel: str, step: Step) -> None:
        log.debug(
            "%s: %s, %d nodes, %.3f s", self.name, kernel, len(step.graph_def.node), time.perf_counter() - self._since
        )
        if self.folder:
            folder = pathlib.Path(self.folder) / self.name / f"worker_{self.worker}"
            self._dump(folder / f"{self._count}_{kernel}", step)
        self._count += 1
        self._since = time.perf_counter()

    def _dump(self, folder: pathlib.Path, step: Step) -> None:
        """Writes the graph for TensorBoard and the step as text, and checks the structure of the step."""
        verify(step)
        self._captured = self._captured or step
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "step.txt").write_text(text_of_notes(step) + text_of_step(step, self._captured), encoding="utf-8")
        with tf.Graph().as_default():  # FileWriter cannot be constructed in eager mode
            writer = tf.compat.v1.summary.FileWriter(str(folder))
            # `add_graph` also accepts a GraphDef, but warns on each call.
            writer.add_event(tf.compat.v1.Event(graph_def=step.graph_def.SerializeToString()))
            writer.close()


SETTING_KERNELS: tuple[AnyKernel, ...] = in_order(
    AssignOwners(),
    PartitionVariables(),
    SetByChief(),
    Prune(),
    ReadRemoteVariables(),
    PlaceOnDevices(),
)
"""Kernels for runs that only set variables."""

LOCAL_KERNELS: tuple[AnyKernel, ...] = in_order(Prune(), PlaceOnDevices())
"""Kernels for runs that only concern this worker, such as those of its iterators."""


def rewrite(
    step: Step,
    context: Context,
    name: str = "step",
    kernels: Sequence[AnyKernel] = KERNELS,
    also: Watcher | None = None,
) -> Step:
    """Returns the step as one worker runs it; kernels added by `register_kernel` run among `kernels`.

    `also` is called with the step after each kernel, too.

    Raises:
        StrategyError, RewriteError: the step cannot be rewritten according to the strategy.
    """
    with _garbage_collection_paused():
        return run_pipeline(with_registered(kernels), step, context, _watched(Watch(name, context.worker), also))


def _watched(watch: Watcher, also: Watcher | None) -> Watcher:
    def both(kernel: str, step: Step) -> None:
        watch(kernel, step)
        if also is not None:
            also(kernel, step)

    return both


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Pauses the garbage collector: a rewrite creates many small objects and no cycles, and collection took a third
    of its time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def find_divided(step: CapturedStep, context: Context) -> tuple[Mapping[str, Sharding], dict[str, Holder]]:
    """Returns the shardings and the holders of the variables that a mesh divides in a step, by name.

    Raises:
        StrategyError: the step cannot be divided according to the strategy.
    """
    last = next(k for k, kernel in enumerate(KERNELS) if kernel.name == ShardTensors.name)
    divided = rewrite(step, context, "shardings", KERNELS[: last + 1])
    assert isinstance(divided, PlacedStep), "made by ShardTensors"
    return divided.shardings, holders_on_mesh(divided, context)
