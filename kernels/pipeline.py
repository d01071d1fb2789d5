"""The order of the kernels, and what watches them."""

from __future__ import annotations

import gc
import logging
import os
import pathlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import tensorflow as tf

from autodist.graph.item import GraphItem
from autodist.graph.serialize import to_proto
from autodist.kernels.all_reduce import ReduceByShuffle
from autodist.kernels.asynchronous import AsynchronousServers
from autodist.kernels.base import Context, Kernel, run_pipeline
from autodist.kernels.bundles import SplitBundles
from autodist.kernels.collectives import ReduceByCollective
from autodist.kernels.compile_step import CompileStep
from autodist.kernels.compile_updates import CompileUpdates
from autodist.kernels.divide_rows import DivideRows
from autodist.kernels.far_reads import ReadFarVariables
from autodist.kernels.gather_rows import GatherRows
from autodist.kernels.inline_branches import InlineBranches
from autodist.kernels.leave_out_compute import LeaveOutCompute
from autodist.kernels.merge_rows import MergeRows
from autodist.kernels.ownership import AssignOwners
from autodist.kernels.pace import SetPace
from autodist.kernels.parameter_server import ParameterServers
from autodist.kernels.partition import Partition
from autodist.kernels.place import Place
from autodist.kernels.proxies import ReadProxies
from autodist.kernels.prune import Prune
from autodist.kernels.random_draws import AdvanceAlike
from autodist.kernels.repeated_rows import AddRowsInOrder
from autodist.kernels.replicate import Replicate
from autodist.kernels.row_arithmetic import GatherBeforeArithmetic
from autodist.kernels.row_joins import ChooseRowJoins
from autodist.kernels.scatter_rows import ScatterRows
from autodist.kernels.set_state import SetByChief
from autodist.kernels.settle_losses import SettleLosses
from autodist.kernels.settle_sums import SettleSums
from autodist.kernels.stale import StaleServers
from autodist.kernels.sum_rows import SumRows
from autodist.kernels.table_writes import TellTableWrites
from autodist.kernels.whole_cotangents import WholeCotangents

log = logging.getLogger("autodist")

DUMP_VARIABLE = "AUTODIST_DUMP"
"""Environment variable that names a folder; the graph after each kernel is written there, for TensorBoard."""

# Branches stand in the graph before all else, since other kernels do not look into them; bundles are split before
# gradients are told from updates; what was made to take losses apart goes before anything is looked for in the
# arithmetic around it, and before what leads to a gradient is followed, which decides which tensor is the gradient for
# all kernels after that; a division of rows is resolved, and tables that are added become rows, before
# gathers move past the arithmetic that this leaves behind them, and then into variables; how rows of replicas are
# joined is chosen while the captured batch can still be followed; the order of rows is fixed where they are written,
# before the scatter is moved to a parameter server; what is joined between workers exists only once the step is
# replicated, and rows are merged before they are sent; functions of XLA are made last, since no kernel looks into
# them.
KERNELS: tuple[Kernel, ...] = (
    InlineBranches(),
    SplitBundles(),
    SettleLosses(),
    SettleSums(),
    WholeCotangents(),
    DivideRows(),
    ScatterRows(),
    SumRows(),
    GatherBeforeArithmetic(),
    GatherRows(),
    TellTableWrites(),
    ChooseRowJoins(),
    AssignOwners(),
    Partition(),
    AddRowsInOrder(),
    AdvanceAlike(),
    Replicate(),
    SetPace(),
    ReadProxies(),
    MergeRows(),
    ReduceByShuffle(),
    ReduceByCollective(),
    AsynchronousServers(),
    StaleServers(),
    ParameterServers(),
    LeaveOutCompute(),
    Prune(),
    ReadFarVariables(),
    Place(),
    CompileStep(),
    CompileUpdates(),
)


@dataclass
class Watch:
    """Dumps the step after each kernel where the environment asks for it, and logs how long each took.

    Attributes:
        name: of the step.
        worker: whose step it is.
        folder: where to; None: nowhere.
    """

    name: str
    worker: int
    folder: str | None = field(default_factory=lambda: os.environ.get(DUMP_VARIABLE))
    _count: int = 0
    _since: float = field(default_factory=time.perf_counter)

    def __call__(self, kernel: str, item: GraphItem) -> None:
        log.debug(
            "%s: %s, %d nodes, %.3f s", self.name, kernel, len(item.graph_def.node), time.perf_counter() - self._since
        )
        if self.folder:
            self._dump(
                pathlib.Path(self.folder) / self.name / f"worker_{self.worker}" / f"{self._count}_{kernel}", item
            )
        self._count += 1
        self._since = time.perf_counter()

    @staticmethod
    def _dump(folder: pathlib.Path, item: GraphItem) -> None:
        """The graph as TensorBoard reads it, and the step as a protobuf."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "graph_item.pb").write_bytes(to_proto(item).SerializeToString())
        with tf.Graph().as_default():  # the writer refuses to be made in eager mode
            writer = tf.compat.v1.summary.FileWriter(str(folder))
            writer.add_graph(None, graph_def=item.graph_def)
            writer.close()


SETTING_KERNELS: tuple[Kernel, ...] = (
    AssignOwners(),
    Partition(),
    SetByChief(),
    Prune(),
    ReadFarVariables(),
    Place(),
)
"""For runs that only set variables."""

LOCAL_KERNELS: tuple[Kernel, ...] = (Prune(), Place())
"""For runs that concern this worker alone, as those of its iterators do."""


def rewrite(item: GraphItem, context: Context, name: str = "step", kernels: Sequence[Kernel] = KERNELS) -> GraphItem:
    """The step as one worker runs it.

    Raises:
        StrategyError, RewriteError: if it cannot be rewritten as the strategy says.
    """
    with _garbage_collection_paused():
        return run_pipeline(kernels, item, context, Watch(name, context.worker))


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """A rewrite makes many small objects and no cycles; collecting between them took a third of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
