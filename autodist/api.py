"""AutoDist: scope → capture → plan → launch → rewrite → run."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import tensorflow as tf

from autodist.batch.axis import require_mapping
from autodist.capture.global_statistics_in_graphs import GraphBatchStatistics
from autodist.capture.gradients import GradientNotes, recording_gradients
from autodist.capture.graph_mode import CapturedGraph
from autodist.capture.in_step_all_reduces import AllReduceNotes, recording_all_reduces
from autodist.capture.inline import load_generated_code_from_memory
from autodist.capture.keras.callbacks import on_every_worker
from autodist.capture.keras.distribution.checks import (
    as_distribution,
    check_current_distribution,
    check_distribution,
    checking_distributions,
    is_distribution,
    setting_distribution,
    sharding_distribution,
)
from autodist.capture.keras.distribution.meshes import check_early_meshes
from autodist.capture.keras.distribution.run_settings import set_run
from autodist.capture.keras.early_initializers import seed_early_initializers
from autodist.capture.local_steps import line_of_script, plain_variable
from autodist.capture.manual import all_gather, all_reduce, all_to_all, manual, reduce_scatter
from autodist.capture.other_strategies import refusing_strategies
from autodist.capture.sharding_marks import alike, constrain
from autodist.capture.shared_files import share_files, share_files_from_now_on
from autodist.capture.stage_marks import StageMark
from autodist.capture.training_hooks import install_hooks, is_distributing, put_back, warn_if_it_trains
from autodist.checkpoint import Checkpoints
from autodist.checkpoint.fit_wrappers import AroundFit
from autodist.checkpoint.keras_callback import CheckpointCallback
from autodist.checkpoint.section import find_resumed, save_automatically, saving_callback
from autodist.checkpoint.session_checkpoints import SessionCheckpoints
from autodist.cluster.hosted_function import HostedFunction, hosted_function
from autodist.cluster.script import require_script
from autodist.cluster.script_end import watch_script_end
from autodist.errors import CaptureError, CheckpointError
from autodist.functions.function_step import DistributedFunction
from autodist.functions.graph_function import GraphSessions
from autodist.functions.keras_training import KerasTraining
from autodist.functions.tracing import Tracing
from autodist.graph.python_calls import elementwise
from autodist.logs.quiet import quiet_tensorflow
from autodist.logs.terminal import ALIKE_EVERYWHERE, log_to_the_terminal
from autodist.placement.layouts import HeldLayout
from autodist.reading.input_shard import InputShard
from autodist.resources import ResourceSpec
from autodist.runs.dry_run import active_dry_run
from autodist.runs.end_with_script import end_with_function, end_with_script
from autodist.runs.keras_mesh import errors_with_mesh, mesh_builder, settings_of
from autodist.runs.keras_values import defer_values
from autodist.runs.metrics.step_metrics import measure_steps
from autodist.runs.resolve_config import resolve
from autodist.runs.restarts import earlier_starts
from autodist.runs.run import Run
from autodist.runs.undistributed import UndistributedScript
from autodist.runtime.dataset import DistributedDataset
from autodist.runtime.heaps import pool_tensors
from autodist.runtime.sampler import Sampler
from autodist.runtime.seeds import is_seeded_by_script, set_default_seed
from autodist.runtime.threads import share_cores
from autodist.sessions.session import DistributedSession
from autodist.sessions.sparse_placeholders import sparse_placeholders_of_rows
from autodist.sharding import Layout
from autodist.strategies import BuildsStrategy
from autodist.tf_compat.tf1_scripts import newer_control_flow, plain_shapes
from autodist.verify.recorder import recorder

log = logging.getLogger("autodist")

Callback = TypeVar("Callback")

watch_script_end()  # now: `sys.exit(main())` looks up `sys.exit` before `main` creates an AutoDist
load_generated_code_from_memory()  # now: functions traced before an AutoDist exists would leave files too
earlier_starts()  # now: child processes that the script starts must not inherit the mark of a re-exec
if (_recorder := recorder()) is not None:
    _recorder.begin()  # now: the script may build layers before it creates an AutoDist


_made: list[Run] = []


def made() -> tuple[Run, ...]:
    """Returns the run of each AutoDist that the script has created in this process."""
    return tuple(_made)


def _begin_run(
    file: str | os.PathLike[str] | None, spec: ResourceSpec | None, chosen: Any, hosted: HostedFunction | None
) -> Run:
    """Begins the run of an AutoDist with these arguments, without the processes of other workers.

    Args:
        file: the argument `resource_spec_file`.
        spec: the argument `resource_spec`.
        chosen: the argument `strategy`.
        hosted: the function that takes part in a run in this process, if any.
    """
    if hosted is not None:
        hosted.take()
    with quiet_tensorflow():
        tf.config.list_physical_devices()  # now: TensorFlow logs the devices on the first call
    sharding, builder = sharding_distribution(chosen), None if is_distribution(chosen) else chosen
    mesh = None if sharding is None else mesh_builder(sharding)
    with errors_with_mesh(sharding):
        run = Run.begin(lambda: resolve(file, spec, builder, mesh, is_first=not _made), find_resumed, hosted)
    if run.index == 0 and run.workers > 1 and hosted is None:
        require_script()
    log_to_the_terminal(run.index == 0)
    run.check_devices()
    return run


def _set_up_process(run: Run) -> None:
    """Makes TensorFlow and Python in this process share cores, memory, files and seeds as the run requires."""
    share_cores(run.spec.workers, run.index)
    if run.divides_variables:
        pool_tensors()
    if run.workers > 1:
        share_files_from_now_on(run.chief.write)
    if run.workers > 1 and not is_seeded_by_script():  # with the script's seed the workers already agree
        seed_early_initializers(run.seed)


class AutoDist:
    """Distributes the training built in its scope over all devices of all machines.

    Args:
        resource_spec_file: the YAML file with the machines and the strategy; None: this machine, one worker.
        strategy: overrides the strategy of the YAML: a strategy builder, the name of one ("AllReduce"), or a mapping as
            under the YAML key `strategy`. A `keras.distribution.ModelParallel`, or a `LayoutMap`, stands for `Mesh`
            with these layouts, and is set in the scope. `keras.distribution.DataParallel()` leaves the choice to the
            YAML.
        resource_spec: the machines, instead of a file.
        strategy_builder: the older name of `strategy`.

    Raises:
        ValueError: both `strategy` and `strategy_builder`, or both `resource_spec_file` and `resource_spec`, are set.
        ResourceSpecError, StrategyError: a value is not valid; the message has its file, line and key.
        ClusterError: several workers are requested, but there is no script that the other workers could run.
    """

    def __init__(
        self,
        resource_spec_file: str | os.PathLike[str] | None = None,
        strategy: BuildsStrategy | str | Mapping[str, Any] | None = None,
        resource_spec: ResourceSpec | None = None,
        strategy_builder: BuildsStrategy | str | Mapping[str, Any] | None = None,
    ) -> None:
        if strategy is not None and strategy_builder is not None:
            raise ValueError("pass either strategy or its older name strategy_builder, not both.")
        chosen = strategy if strategy_builder is None else strategy_builder
        if is_distribution(chosen):
            chosen = as_distribution(chosen)
        self._distribution = chosen if is_distribution(chosen) else None
        hosted = hosted_function()
        self._run = _begin_run(resource_spec_file, resource_spec, chosen, hosted)
        self._set_keras_devices(chosen)
        self._run.metrics = measure_steps(self._run)
        self._run.start_others()
        _set_up_process(self._run)
        self._share = InputShard(self._run)
        self._automatic = save_automatically(self._run)
        around_fit = AroundFit(self._automatic, saving_callback(self._run), self._run.end.noting_interrupts)
        self._keras = KerasTraining(self._run, around_fit, self._share, saves=self._automatic is not None)
        self._has_warned_of_count = False
        self._notes: GradientNotes | None = None
        self._sums: AllReduceNotes | None = None
        self._graph_sessions = GraphSessions(self._run, self._noted)
        self._alone = UndistributedScript(
            self._run.spec,
            self._run.index == 0,
            self._is_in_scope,
            is_trained=lambda variable: self._run.tracker.of(variable) is not None,
            pull=self._run.pull,
        )
        self._run.on_training, self._run.before_training = self._alone.begin_distributed, self._alone.before_training
        if hosted is None:
            end_with_script(self._run, self._alone)
        else:
            end_with_function(self._run, self._alone, hosted)
        _made.append(self._run)

    # -- workers ---------------------------------------------------------------------------------------------------

    @property
    def is_chief(self) -> bool:
        """True in the process that the user started."""
        return self.worker_index == 0

    @property
    def worker_index(self) -> int:
        """Index of this worker; the chief has index 0."""
        self._run.coordination.are_workers_distinguished = True
        self._run.check_others()
        return self._run.index

    @property
    def num_workers(self) -> int:
        """Number of workers. Each worker feeds its own part of the data."""
        self._alone.divides_data = True
        return self._counted("num_workers", len(self._target_spec.workers))

    @property
    def num_replicas(self) -> int:
        """Number of replicas of all workers."""
        return self._counted("num_replicas", len(self._target_spec.replicas))

    def _counted(self, name: str, count: int) -> int:
        """Returns a count; warns if a training step reads it during capture, as losses of `tf.distribute` do."""
        if count > 1 and is_distributing() and not self._has_warned_of_count:
            warn_if_it_trains(functools.partial(self._warn_of_count, name, line_of_script()))
        return count

    def _warn_of_count(self, name: str, line: str) -> None:
        if not self._has_warned_of_count:
            self._has_warned_of_count = True
            log.warning(
                "a training step reads ad.%s (%s). If it divides the loss by it, remove the division: the loss of a "
                "step is that of the whole batch, as on one device, and the division makes its gradients too small.",
                name, line, extra=ALIKE_EVERYWHERE,
            )  # fmt: skip

    @property
    def _target_spec(self) -> ResourceSpec:
        """The machines that the script is written for. A dry run executes the script on one of their devices."""
        self._run.check_others()
        return self._planned_spec

    @property
    def _planned_spec(self) -> ResourceSpec:
        dry_run = active_dry_run()
        return self._run.spec if dry_run is None else dry_run.spec

    @property
    def num_replicas_in_sync(self) -> int:
        """The same as `num_replicas`; the name used by `tf.distribute`."""
        return self.num_replicas

    # -- distribution ----------------------------------------------------------------------------------------------

    @contextmanager
    def scope(self, batch_axis: Mapping[str, int | None] | None = None) -> Iterator[AutoDist]:
        """Context manager. Models and steps that are built in it train on all replicas, even after it is closed.

        Args:
            batch_axis: for Keras models: maps an input of `fit` to the axis along which it is split over the replicas,
                or to None if every replica gets the complete value. The inputs are named `x`, `y` and `sample_weight`;
                elements of a nest are named `x/image` or `y/0`. By default all inputs are split along axis 0.

        Raises:
            CaptureError: the scope is inside a strategy of `tf.distribute`, or contains one; or `batch_axis` is not a
                mapping.
            StrategyError: a Keras distribution is set, before the scope or in it, that does not fit the run.
        """
        self._run.check_others()
        if not tf.executing_eagerly():
            tf.compat.v1.enable_resource_variables()
        set_default_seed(self._run.seed)
        set_run(self._settings)  # again: the script may have created another AutoDist
        install_hooks()  # again: the script may have imported tf_keras since the last call
        try:
            with (
                self._alone.noting_variables(),
                newer_control_flow(),
                sparse_placeholders_of_rows(),
                refusing_strategies(),
                setting_distribution(self._distribution),
                checking_distributions(),
                self._keras.adopting(require_mapping(batch_axis, "inputs of fit")),
                recording_all_reduces(in_functions=False) as self._sums,
                recording_gradients(in_functions=False, decomposer=self._decomposer(self._sums)) as self._notes,
            ):
                yield self
        finally:
            put_back()
            if self._run.workers > 1:
                share_files(self._run.chief.write)  # again: other modules may have copied TensorFlow's functions

    @plain_shapes()
    def create_distributed_session(self, batch_axis: Mapping[Any, int | None] | None = None) -> DistributedSession:
        """Creates a session that runs the default graph on all replicas; replaces `tf.compat.v1.Session()`.

        Args:
            batch_axis: maps a placeholder (or its name) to the axis along which the fed value is split over the
                replicas; negative axes count from the last. None: every replica gets the complete value. By default,
                placeholders whose axis 0 is open are split along it.

        Raises:
            CaptureError: no gradient is applied in the graph, the scope contained two graphs, or a placeholder has no
                such batch axis.
            StrategyError: the strategy is not possible for this graph.
        """
        self._run.check_others()
        check_current_distribution()
        self._share.require_no_files("a session's graph has no data sets whose files can be sharded")
        if self._notes is None or self._sums is None:
            raise CaptureError(
                "create_distributed_session is called outside the scope; build the graph within `with ad.scope():`."
            )
        if tf.executing_eagerly():
            raise CaptureError(
                "create_distributed_session needs a graph: write `with tf.Graph().as_default(), ad.scope():`."
            )
        graph = tf.compat.v1.get_default_graph()
        captured = CapturedGraph.of(graph, self._notes.calls, self._sums.sums)
        with quiet_tensorflow(), setting_distribution(self._distribution):
            return DistributedSession(self._run, captured, self._notes, batch_axis)

    def function(
        self,
        step: Callable[..., Any] | None = None,
        *,
        batch_axis: Mapping[str, int | None] | None = None,
        batch: str | None = None,
        jit_compile: bool | None = None,
        input_signature: Any = None,
        reduce_retracing: bool = False,
        autograph: bool = True,
    ) -> Any:
        """Decorator for a training step (a function or a method); replaces `tf.function`.

        Args:
            step: the step; it computes gradients and applies them.
            batch_axis: maps a parameter to the axis along which its argument is split over the replicas; negative axes
                count from the last. None: every replica gets the complete value. By default, arrays are split along
                axis 0, and scalars are not split.
            batch: "per_worker" (default): each worker passes its own part of the batch. "global": every worker passes
                the same batch, and each keeps its shard.
            jit_compile: True to compile the step with XLA, as in `tf.function`. Parts that XLA cannot compile run
                without it and are named in the log.
            input_signature: as in `tf.function`: shapes and dtypes of all arguments; the step is traced once for them.
            reduce_retracing: as in `tf.function`: True to trace once for shapes that differ along axes other than the
                batch axis.
            autograph: as in `tf.function`: True to convert Python control flow.
        """
        if batch not in (None, "per_worker", "global"):
            raise ValueError(f"batch is {batch!r}; it may be 'global' or 'per_worker'.")
        self._run.check_others()
        is_global = (batch or self._run.spec.batch) == "global"

        tracing = Tracing(bool(jit_compile), input_signature, reduce_retracing, autograph)

        def decorate(function: Callable[..., Any]) -> DistributedFunction:
            if (dry_run := active_dry_run()) is not None:
                dry_run.on_step_defined(function)
            return DistributedFunction(
                function, self._run, batch_axis, is_global, tracing, sessions=self._graph_sessions
            )

        return decorate if step is None else decorate(step)

    @tf.autograph.experimental.do_not_convert
    def stage(self, stage: int) -> StageMark:
        """Assigns the operations of a `with ad.stage(k):` block to pipeline stage k of a Pipeline strategy.

        Stage k gets the variables and operations created in the block and the Keras layers created or called there.
        Other strategies ignore the block and log that.

        Args:
            stage: counted from 0.

        Raises:
            ValueError: the stage is not a whole number from 0.
        """
        return StageMark(stage)

    def constrain(self, x: tf.Tensor, layout: Layout) -> tf.Tensor:
        """Divides a tensor of a step over the axes of a mesh, as the strategy Mesh does with variables.

        Call it in the step: readers of the result see it divided. Its gradient is divided alike. Under another
        strategy, and outside of steps, it returns `x`.

        ```python
        h = ad.constrain(h, ("data", None, "model"))
        ```

        Args:
            x: of known rank.
            layout: for each dimension the axis that divides it, several axes (major first), None if it stays whole, or
                "?" if this follows from other layouts. Missing dimensions stay whole. The axis of the batch is allowed
                for the dimension of the examples.

        Raises:
            ValueError: the layout does not fit the rank.
            StrategyError: when the step is rewritten; the mesh has no such axis, or it does not divide the dimension.
        """
        return constrain(x, layout)

    def alike(self, *tensors: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Makes the strategy Mesh divide tensors of a step alike, with their gradients; returns the tensors.

        Raises:
            ValueError: their shapes differ.
        """
        return alike(*tensors)

    def layout(self, variable: Any) -> HeldLayout:
        """Returns how a mesh divides a variable: for each dimension an axis, several axes (major first) or None.

        Under a strategy without a mesh, every entry is None.

        Args:
            variable: a variable of TensorFlow or Keras that a training step has used.

        Raises:
            StrategyError: no training step has used it yet.
        """
        return self._run.layout(plain_variable(variable))

    @tf.autograph.experimental.do_not_convert
    def manual(
        self, fn: Callable[..., Any], *, inputs: Sequence[Layout], outputs: Sequence[Layout], axes: Sequence[str]
    ) -> Callable[..., Any]:
        """Returns a function that calls `fn` in a manual region, whose collectives the script calls itself.

        On a mesh, each place computes the body on its parts of the inputs. Only `all_reduce`, `all_gather`,
        `reduce_scatter` and `all_to_all` exchange tensors over the manual axes. On one device, and under other
        strategies, the region computes the same numbers: there each collective returns its operand. A region that would
        need another exchange to compute them is refused.

        ```python
        def layer(x, up, down):
            return ad.all_reduce(tf.nn.gelu(x @ up) @ down, "model")

        layer = ad.manual(
            layer, inputs=[(), (None, "model"), ("model", None)], outputs=[()], axes=["model"]
        )
        ```

        Source: `shard_map` of JAX, and the manual computation of Shardy.

        Args:
            fn: takes tensors, and returns a tensor or several.
            inputs: the layout of each argument, as for `constrain`.
            outputs: the layout of each result.
            axes: the manual axes. That of the batch is none of them.

        Raises:
            ValueError: the layouts do not fit the tensors, or regions nest.
            StrategyError: when the step is rewritten; the mesh has no such axis, a length does not divide, the region
                reads a divided tensor that is no input, or it needs an exchange that it does not call.
        """
        return manual(fn, inputs, outputs, axes)

    @tf.autograph.experimental.do_not_convert
    def all_reduce(self, x: tf.Tensor, axes: str | Sequence[str]) -> tf.Tensor:
        """In a manual region, adds the parts of a sum that the places along some axes have.

        Args:
            x: a tensor whose sum over the axes is missing, as the product along a divided dimension.
            axes: manual axes.

        Raises:
            ValueError: the call is outside of a region, or an axis is not manual.
            StrategyError: when the step is rewritten; `x` is no such tensor.
        """
        return all_reduce(x, axes)

    @tf.autograph.experimental.do_not_convert
    def all_gather(self, x: tf.Tensor, axes: str | Sequence[str], axis: int) -> tf.Tensor:
        """In a manual region, concatenates the parts of a tensor along dimension `axis`; raises as `all_reduce`.

        The gradient is reduce-scattered.
        """
        return all_gather(x, axes, axis)

    @tf.autograph.experimental.do_not_convert
    def reduce_scatter(self, x: tf.Tensor, axes: str | Sequence[str], axis: int) -> tf.Tensor:
        """In a manual region, adds as `all_reduce` does; each place gets its part along dimension `axis`.

        The gradient is gathered.
        """
        return reduce_scatter(x, axes, axis)

    @tf.autograph.experimental.do_not_convert
    def all_to_all(self, x: tf.Tensor, axes: str | Sequence[str], split_axis: int, concat_axis: int) -> tf.Tensor:
        """In a manual region, divides a tensor along `split_axis` that is divided along `concat_axis`.

        Each place splits its part along `split_axis`, sends a piece to each other place of its row, and concatenates
        the pieces that it receives along `concat_axis`. The gradient takes the opposite way. Raises as `all_reduce`.
        """
        return all_to_all(x, axes, split_axis, concat_axis)

    def distribute_dataset(self, dataset: Iterable[Any]) -> DistributedDataset:
        """Returns this worker's part of each global batch, to be passed to a step.

        Args:
            dataset: of global batches, the same on every worker (shuffles without a seed use the run's seed). With
                `shard: files` in the YAML its files are sharded over the workers, and a part may have no rows.

        Returns:
            An iterable of the same nests, each with only this worker's rows.

        Raises:
            ResourceSpecError: the YAML has `shard: files`, and the files cannot be sharded.
        """
        self._run.check_others()
        self._alone.divides_data = True
        made = DistributedDataset(
            dataset,
            self._run.spec.feeding_workers,
            self._run.index,
            on_first=self._run.input_consistency.record_data_set,
            reading=self._share.reading(is_gathered=True),
            on_own_failure=self._run.failed_step.note,
        )
        if self._automatic is not None:
            self._automatic.loop.add(made)
        return made

    @staticmethod
    def elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
        """Marks a Python function of `Dataset.map` or of a step, so that each worker calls it for its own examples.

        ```python
        @ad.elementwise
        def decode(path):
            return np.load(path)

        data = paths.map(lambda path: tf.numpy_function(decode, [path], tf.float32)).batch(64)
        ```

        The mark promises that the result for an element depends only on that element: the function keeps no state
        between calls and draws no random numbers other than from its arguments. AutoDist looks for the mark where
        `tf.py_function` or `tf.numpy_function` calls the function, in a map after the last shuffle and before batching.

        In a step (a loss, a metric), and in a map of batches, an element is a row: the function takes batches, and
        computes each row of its result from the same row of its arguments.

        Args:
            function: as `tf.py_function` or `tf.numpy_function` takes it.

        Raises:
            TypeError: the function is not callable.
        """
        return elementwise(function)

    def sampler(self, records: int, batch: int, seed: int | None = 0, *, drop_remainder: bool = False) -> Sampler:
        """Returns the record numbers that this worker reads, batch by batch, in an order that all workers share.

        ```python
        for numbers in ad.sampler(len(files), 64, seed=1):  # an epoch; the next iteration has another order
            step(*read(files, numbers))
        ```

        Args:
            records: number of records.
            batch: records in a global batch.
            seed: for the order of each epoch; None: the records come in order.
            drop_remainder: True to drop a last batch with fewer records.

        Returns:
            An iterable that yields a vector of int64 for each batch: numbers from 0 to `records` - 1.

        Raises:
            ValueError: `records` or `batch` is below 1.
        """
        self._run.check_others()
        self._share.require_no_files(
            "ad.sampler shards record numbers, and files cannot be assigned to workers by them"
        )
        self._alone.divides_data = True
        made = Sampler(records, batch, seed, drop_remainder, self._run.spec.feeding_workers, self._run.index)
        if self._automatic is not None:
            self._automatic.loop.add(made)
        return made

    def batch_slice(self, start: int, stop: int) -> slice:
        """Returns the slice of this worker's examples among the examples `start` to `stop` of a global batch.

        A `keras.utils.PyDataset` uses it to return only its worker's part of every batch; `fit` adds up the sizes of
        the parts:

        ```python
        def __getitem__(self, index):
            rows = ad.batch_slice(index * 64, min(index * 64 + 64, len(self.files)))
            return load(self.files[rows]), self.labels[rows]
        ```

        Args:
            start: the first example, counted from 0 over all global batches.
            stop: one past the last example.

        Raises:
            ValueError: there are no such examples.
        """
        self._alone.divides_data = True
        return self._share.slices(start, stop)

    def reduce(self, value: Any, how: str = "mean") -> Any:
        """Reduces a value over all workers. Every worker calls it between steps, with arrays of one shape and dtype.

        Args:
            value: a number, boolean, array or tensor.
            how: "mean", "sum", "max" or "min".

        Returns:
            An array of the value's shape, bitwise equal on every worker. The result is that of NumPy's reduction over
            an axis of workers; for example, a mean of integers is float64.

        Raises:
            ReductionError: the reduction is not possible, or the workers' arguments differ; raised on all workers.
        """
        return self._run.coordination.reduce(value, how)

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all workers, in their order. Every worker calls it between steps.

        ```python
        predicted = np.concatenate(ad.gather(predicted))  # each worker's rows, on every worker
        ```

        Args:
            value: anything that can be pickled; arrays of the workers may have different lengths.

        Raises:
            ReductionError: a value cannot be pickled, or a worker makes another call; raised on all workers. Or this
                worker cannot import the class of a value; raised on this worker.
        """
        return self._run.coordination.gather_values(value, "gather")

    def broadcast(self, value: Any = None) -> Any:
        """Returns the chief's value. Every worker calls it between steps; the values of the others are ignored.

        ```python
        settings = ad.broadcast(json.load(open("settings.json")) if ad.is_chief else None)
        ```

        Args:
            value: on the chief, anything that can be pickled.

        Raises:
            ReductionError: the value cannot be pickled, or a worker makes another call; raised on all workers. Or this
                worker cannot import the value's class; raised on this worker.
        """
        return self._run.coordination.gather_values(value if self._run.index == 0 else None, "broadcast")[0]

    def barrier(self) -> None:
        """Returns once all workers have called it, between steps, and their steps have been applied.

        Raises:
            ReductionError: a worker makes another call; raised on all workers.
        """
        self._run.coordination.gather_values(None, "barrier")

    def end_local_steps(self) -> None:
        """Averages the local steps since the last outer step (`DiLoCo`), before it is due.

        Every worker calls it between two steps, at the end of its own loop, so that the variables have all that was
        trained; `fit` does so at its end. It does nothing right after an outer step, and without local steps.
        """
        self._run.end_local_steps()

    def pull(self) -> None:
        """Updates the script's variables to their latest values. Reading a variable also updates it."""
        self._run.pull()

    def checkpoint(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 3,
        session: DistributedSession | None = None,
        **objects: Any,
    ) -> Checkpoints:
        """Returns an object that saves and restores models, optimizers and variables, in files that TensorFlow reads.

        A checkpoint can be restored under any strategy.

        Args:
            folder: of the checkpoints, on the chief's machine; restoring needs a folder that all machines see.
            keep: number of checkpoints to keep; older ones are removed.
            session: the session whose variables are saved by name, as by `tf.compat.v1.train.Saver`.
            objects: by name, as for `tf.train.Checkpoint`: `model=model, optimizer=optimizer`. Not with a session.

        Raises:
            CheckpointError: the folder is not on a file system, or a graph is being built and there is no session.
        """
        if session is not None:
            if objects:
                raise ValueError(f"{', '.join(objects)}: a session saves its variables by name; pass no objects.")
            return SessionCheckpoints(self._run, folder, keep, session)
        if not tf.executing_eagerly():
            raise CheckpointError(
                "ad.checkpoint saves objects of eager TensorFlow, and a graph is being built. Pass its session, "
                "ad.checkpoint(folder, session=session), or save with a tf.compat.v1.train.Saver."
            )
        return Checkpoints(self._run, folder, keep, objects)

    @property
    def steps_done(self) -> int:
        """Number of training steps done so far, including those of the runs that this one resumes.

        With `checkpoint` in the YAML, a loop of the script starts at this number:
        `for step in range(ad.steps_done, 10_000)`. If an iteration has several training steps, each of them counts.
        """
        if self._automatic is not None:
            self._automatic.on_steps_read(sys._getframe(1))
        return self._run.step

    def checkpoint_callback(
        self,
        folder: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        keep: int = 3,
    ) -> CheckpointCallback:
        """Returns a callback for `fit` that saves the model, its optimizer, the callbacks' states and the position.

        A `fit` with this callback resumes at the epoch and batch of the last checkpoint in the folder.

        Args:
            folder: of the checkpoints; as for `checkpoint`.
            every_steps: the number of training steps between two saves; None: no schedule by steps.
            every_minutes: the minutes between two saves, by the chief's clock; None: no schedule by time.
            keep: number of checkpoints to keep.

        Raises:
            CheckpointError: the folder is not on a file system.
        """
        return CheckpointCallback(self._run, folder, keep, every_steps, every_minutes)

    def _set_keras_devices(self, chosen: Any) -> None:
        """Makes `keras.distribution` list the places of the run, and checks the meshes that the script has made.

        Args:
            chosen: the argument `strategy`.
        """
        self._settings = settings_of(self._run, self._planned_spec, chosen)
        if not self._settings.is_reference:  # which has one device, whatever the script says
            check_early_meshes(self._settings)
        set_run(self._settings)
        if self._settings.divides_variables:
            defer_values()
        check_distribution(self._distribution or sharding_distribution(chosen))

    def _decomposer(self, sums: AllReduceNotes) -> GraphBatchStatistics | None:
        """Returns the rule for sums and means of the global batch in graph losses; None if no batch is split."""
        return GraphBatchStatistics(sums) if self._run.spec.splits_batches else None

    def _noted(self) -> tuple[GradientNotes, AllReduceNotes] | None:
        """Returns the gradients and all-reduces noted in the scope; None outside any scope."""
        return None if self._notes is None or self._sums is None else (self._notes, self._sums)

    def _is_in_scope(self, graph: object) -> bool:
        """Returns True if gradients of this graph were computed in the scope."""
        return self._notes is not None and any(call.graph is graph for call in self._notes.calls)

    def on_every_worker(self, callback: Callback) -> Callback:
        """Makes `fit` call a recording callback on every worker; by default, `fit` calls it only on the chief.

        ```python
        model.fit(x, y, callbacks=[ad.on_every_worker(keras.callbacks.CSVLogger(f"log{ad.worker_index}.csv"))])
        ```

        Args:
            callback: a Keras callback that writes files, or one of a tracker (mlflow, wandb). `fit` calls all other
                callbacks on every worker anyway.

        Returns:
            The same callback.
        """
        return on_every_worker(callback)
