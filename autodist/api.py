"""AutoDist: scope → capture → plan → launch → rewrite → run."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import tensorflow as tf

from autodist.batch.axis import require_mapping
from autodist.capture.early_initializers import seed_early_initializers
from autodist.capture.gradients import GradientNotes, noting_gradients
from autodist.capture.graph_mode import CapturedGraph
from autodist.capture.in_step_all_reduces import AllReduceNotes, noting_sums
from autodist.capture.inline import load_generated_code_from_memory
from autodist.capture.keras_callbacks import on_every_worker
from autodist.capture.keras_distribution import checking_distributions
from autodist.capture.other_strategies import refusing_strategies
from autodist.capture.shared_files import share_files
from autodist.capture.stage_marks import StageMark
from autodist.capture.training_hooks import hook_in, put_back
from autodist.capture.whole_in_graphs import WholeInGraph
from autodist.checkpoint import Checkpoints
from autodist.checkpoint.around_fit import AroundFit
from autodist.checkpoint.keras_callback import CheckpointCallback
from autodist.checkpoint.of_session import SessionCheckpoints
from autodist.checkpoint.section import find_resumed, save_automatically, saving_callback
from autodist.cluster.script import require_script
from autodist.cluster.script_end import watch_script_end
from autodist.errors import AutoDistError, CaptureError, CheckpointError
from autodist.functions.function_step import DistributedFunction
from autodist.functions.graph_function import GraphSessions
from autodist.functions.keras_training import KerasTraining
from autodist.functions.tracing import Tracing
from autodist.logs.quiet import quiet_tensorflow
from autodist.logs.terminal import ALIKE_EVERYWHERE, log_to_the_terminal
from autodist.reading.elementwise import elementwise
from autodist.reading.file_sharding import NOTHING_DEALT
from autodist.reading.input_shard import InputShard
from autodist.resources import ResourceSpec
from autodist.runs.dry_run import look
from autodist.runs.resolve_config import choose
from autodist.runs.restarts import before, restart
from autodist.runs.run import Run
from autodist.runs.undistributed import UndistributedScript
from autodist.runtime.dataset import DistributedDataset
from autodist.runtime.sampler import Sampler
from autodist.runtime.seeds import is_seeded_by_script, seed_what_has_no_seed
from autodist.runtime.threads import share_cores
from autodist.sessions.session import DistributedSession
from autodist.strategies import BuildsStrategy
from autodist.tf_compat.tf1_scripts import newer_control_flow, plain_shapes
from autodist.verify.recorder import recorder

log = logging.getLogger("autodist")

Callback = TypeVar("Callback")

watch_script_end()  # now: `sys.exit(main())` looks up `sys.exit` before `main` makes an AutoDist
load_generated_code_from_memory()  # now: what is traced before there is an AutoDist leaves files, too
before()  # now: what the script starts, before it makes an AutoDist too, is not to find that it has begun anew
if (_recorder := recorder()) is not None:
    _recorder.begin()  # now: the script may build layers before it makes an AutoDist


_made: list[Run] = []


def made() -> tuple[Run, ...]:
    """The run of each AutoDist that the script has made in this process."""
    return tuple(_made)


class AutoDist:
    """Trains what is built in its scope on all devices of all machines.

    Args:
        resource_spec_file: the YAML of the machines and the strategy; None: this machine, one worker.
        strategy: a builder, which decides the strategy in place of what the YAML says; or what may stand there: the
            name of a builder ("AllReduce"), or a mapping.
        resource_spec: the machines, in place of a file.
        strategy_builder: the older name of `strategy`.

    Raises:
        ValueError: `strategy` and `strategy_builder` are given, or `resource_spec_file` and `resource_spec`.
        ResourceSpecError, StrategyError: with file, line and key.
        ClusterError: several workers are asked for where no script runs that others could run as well.
    """

    def __init__(
        self,
        resource_spec_file: str | os.PathLike[str] | None = None,
        strategy: BuildsStrategy | str | Mapping[str, Any] | None = None,
        resource_spec: ResourceSpec | None = None,
        strategy_builder: BuildsStrategy | str | Mapping[str, Any] | None = None,
    ) -> None:
        if strategy is not None and strategy_builder is not None:
            raise ValueError("give strategy or its older name strategy_builder, not both.")
        chosen = strategy if strategy_builder is None else strategy_builder
        with quiet_tensorflow():
            tf.config.list_physical_devices()  # now, since TensorFlow says what it finds when it is asked first
        self._run = Run.begin(
            lambda: choose(resource_spec_file, resource_spec, chosen, is_first=not _made), find_resumed
        )
        if self._run.index == 0 and self._run.workers > 1:
            require_script()
        log_to_the_terminal(self._run.index == 0)
        self._run.check_devices()
        self._run.start_others()
        share_cores(self._run.spec.workers, self._run.index)
        self._share_files()
        if self._run.workers > 1 and not is_seeded_by_script():  # else they are alike
            seed_early_initializers(self._run.seed)
        self._share = InputShard(self._run)
        self._automatic = save_automatically(self._run)
        around_fit = AroundFit(self._automatic, saving_callback(self._run), self._run.end.noting_interrupts)
        self._keras = KerasTraining(self._run, around_fit, self._share, saves=self._automatic is not None)
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
        self._process = os.getpid()
        atexit.register(self._end)
        _made.append(self._run)

    # -- who runs --------------------------------------------------------------------------------------------------

    @property
    def is_chief(self) -> bool:
        """Whether this is the process that the user started."""
        return self.worker_index == 0

    @property
    def worker_index(self) -> int:
        """Index of this worker; the chief's is 0."""
        self._run.coordination.are_workers_distinguished = True
        self._run.check_others()
        return self._run.index

    @property
    def num_workers(self) -> int:
        """How many workers there are, of which each feeds its own part of the data."""
        self._alone.divides_data = True
        return len(self._told_spec.workers)

    @property
    def num_replicas(self) -> int:
        """How many replicas all workers have together."""
        return len(self._told_spec.replicas)

    @property
    def _told_spec(self) -> ResourceSpec:
        """The machines for which the script is written: where a command looks at it, it runs on one device of them."""
        self._run.check_others()
        looks = look()
        return self._run.spec if looks is None else looks.spec

    @property
    def num_replicas_in_sync(self) -> int:
        """The same as `num_replicas`, under the name that `tf.distribute` has for it."""
        return self.num_replicas

    # -- what is distributed ---------------------------------------------------------------------------------------

    @contextmanager
    def scope(self, batch_axis: Mapping[str, int | None] | None = None) -> Iterator[AutoDist]:
        """What is built here trains on all replicas, also after the scope.

        Args:
            batch_axis: for models of Keras, by input of `fit` the axis along which it is split over the replicas, or
                None, where every replica gets the whole. Inputs are called `x`, `y` and `sample_weight`, and what is in
                a nest `x/image` or `y/0`; by default all are split along their first axes.

        Raises:
            CaptureError: a strategy of `tf.distribute`, or a distribution of Keras other than `DataParallel`, is in
                use around it, or within it; or `batch_axis` is no mapping.
        """
        self._run.check_others()
        if not tf.executing_eagerly():
            tf.compat.v1.enable_resource_variables()
        seed_what_has_no_seed(self._run.seed)
        hook_in()  # the script may have imported tf_keras since
        try:
            with (
                self._alone.noting_variables(),
                newer_control_flow(),
                refusing_strategies(),
                checking_distributions(),
                self._keras.adopting(require_mapping(batch_axis, "inputs of fit")),
                noting_sums(in_functions=False) as self._sums,
                noting_gradients(in_functions=False, whole=self._whole_in_graph(self._sums)) as self._notes,
            ):
                yield self
        finally:
            put_back()
            self._share_files()  # tf_keras is imported where it is used first, maybe

    @plain_shapes()
    def create_distributed_session(self, batch_axis: Mapping[Any, int | None] | None = None) -> DistributedSession:
        """A session that runs the default graph on all replicas, in place of `tf.compat.v1.Session()`.

        Args:
            batch_axis: by placeholder (or its name), the axis along which what is fed is split over the replicas,
                negative ones counted from the last; by default the first axis of a placeholder that leaves it open;
                None: every replica gets the whole.

        Raises:
            CaptureError: no gradient is applied in the graph, there were two graphs in the scope, or a placeholder
                has no such batch axis.
            StrategyError: the strategy asks for what cannot be done.
        """
        self._run.check_others()
        self._share.require_no_files("a session's graph has no data sets whose files are dealt out")
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
        with quiet_tensorflow():
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
        """Decorator of a training step, or of a method that is one, in place of `tf.function`.

        Args:
            step: the step; it computes gradients and applies them.
            batch_axis: by parameter, the axis along which an argument is split over the replicas, negative ones counted
                from the last; by default the first one of arrays, none of scalars; None: every replica gets the whole.
            batch: "per_worker" (default): what is passed is this worker's own part; "global": every worker passes the
                same batch, of which each keeps its share.
            jit_compile: whether XLA compiles the step, as for `tf.function`; what it cannot compile runs without it and
                is named in the log.
            input_signature: as for `tf.function`: shapes and dtypes of all arguments, for which it is traced once.
            reduce_retracing: likewise: whether shapes that differ, along other axes than the batch's, are traced once
                more as one.
            autograph: likewise: whether Python's control flow is converted.
        """
        if batch not in (None, "per_worker", "global"):
            raise ValueError(f"batch is {batch!r}; it may be 'global' or 'per_worker'.")
        self._run.check_others()
        is_global = (batch or self._run.spec.batch) == "global"

        tracing = Tracing(bool(jit_compile), input_signature, reduce_retracing, autograph)

        def decorate(function: Callable[..., Any]) -> DistributedFunction:
            if (looks := look()) is not None:
                looks.defines_step(function)
            return DistributedFunction(
                function, self._run, batch_axis, is_global, tracing, sessions=self._graph_sessions
            )

        return decorate if step is None else decorate(step)

    @tf.autograph.experimental.do_not_convert
    def stage(self, stage: int) -> StageMark:
        """`with ad.stage(k):` gives what is made there to pipeline stage k, where the strategy is a Pipeline.

        Variables and operations made there, and Keras layers made or called there, belong to that stage. It means
        nothing to other strategies, which is told.

        Args:
            stage: counted from 0.

        Raises:
            ValueError: it is no number of a stage.
        """
        return StageMark(stage)

    def distribute_dataset(self, dataset: Iterable[Any]) -> DistributedDataset:
        """This worker's part of each global batch, to be passed to a step.

        Args:
            dataset: of global batches, the same on every worker (the run's seed reaches shuffles that have none). Under
                `shard: files` in the YAML its files are dealt out, and a part may have no rows.

        Returns:
            What gives, iteration by iteration, the same nests with this worker's rows alone.

        Raises:
            ResourceSpecError: `shard: files` is asked for, and the files cannot be dealt out.
        """
        self._run.check_others()
        self._alone.divides_data = True
        made = DistributedDataset(
            dataset,
            self._run.spec.feeding_workers,
            self._run.index,
            on_first=self._run.input_consistency.tell_of_data_set,
            reading=self._share.reading(is_gathered=True),
            on_own_failure=self._run.failed_step.note,
        )
        if self._automatic is not None:
            self._automatic.loop.add(made)
        return made

    @staticmethod
    def elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
        """Marks a Python function of a data set's map, so that each worker calls it for its own examples alone.

        ```python
        @ad.elementwise
        def decode(path):
            return np.load(path)

        data = paths.map(lambda path: tf.numpy_function(decode, [path], tf.float32)).batch(64)
        ```

        The mark promises that what the function gives for an element depends on nothing else: it keeps no state from
        call to call, and draws no random numbers but from what it is given. It is found where `tf.py_function` or
        `tf.numpy_function` calls the marked function, in a map behind the last shuffle and before the batches.

        Args:
            function: as `tf.py_function` or `tf.numpy_function` takes it.

        Raises:
            TypeError: it cannot be called.
        """
        return elementwise(function)

    def sampler(self, records: int, batch: int, seed: int | None = 0, *, drop_remainder: bool = False) -> Sampler:
        """The numbers of the records that this worker reads, batch by batch, in an order that all workers share.

        ```python
        for numbers in ad.sampler(len(files), 64, seed=1):  # an epoch; the next iteration has another order
            step(*read(files, numbers))
        ```

        Args:
            records: how many there are.
            batch: how many a global batch has.
            seed: from which the order of each epoch is drawn; None: they come in order.
            drop_remainder: whether a last batch that would have fewer is left out.

        Returns:
            What gives, iteration by iteration, a vector of int64 for each batch: numbers from 0 to `records` - 1.

        Raises:
            ValueError: there are no records, or batches would have none.
        """
        self._run.check_others()
        self._share.require_no_files("ad.sampler deals out numbers of records, of which no file is one worker's")
        self._alone.divides_data = True
        made = Sampler(records, batch, seed, drop_remainder, self._run.spec.feeding_workers, self._run.index)
        if self._automatic is not None:
            self._automatic.loop.add(made)
        return made

    def batch_slice(self, start: int, stop: int) -> slice:
        """Of a global batch, the examples from `start` to `stop`, those that this worker reads.

        For a `keras.utils.PyDataset`, which then gives its worker's part alone, of every batch; `fit` counts the parts
        together:

        ```python
        def __getitem__(self, index):
            rows = ad.batch_slice(index * 64, min(index * 64 + 64, len(self.files)))
            return load(self.files[rows]), self.labels[rows]
        ```

        Args:
            start: the first example, counted from 0 in all that the global batches hold.
            stop: the one behind the last.

        Raises:
            ValueError: there are no such examples.
        """
        self._alone.divides_data = True
        return self._share.slices(start, stop)

    def reduce(self, value: Any, how: str = "mean") -> Any:
        """A value reduced over all workers; all of them call it, between steps, with arrays of one shape and type.

        Args:
            value: a number, truth value, array or tensor.
            how: "mean", "sum", "max" or "min".

        Returns:
            An array of the value's shape, with the same bits on every worker, as NumPy reduces it over an axis of
            workers: a mean of integers is float64, for example.

        Raises:
            ReductionError: it cannot be reduced so, or workers called it with different values; on all workers.
        """
        return self._run.coordination.reduce(value, how)

    def pull(self) -> None:
        """Brings the script's variables up to date; reading one does it too."""
        self._run.pull()

    def checkpoint(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 3,
        session: DistributedSession | None = None,
        **objects: Any,
    ) -> Checkpoints:
        """Saves what the script trains, and restores it, whatever the strategy; files that TensorFlow reads.

        Args:
            folder: of the checkpoints, on the chief's machine; to restore from it, all machines have to see it.
            keep: how many stay there; older ones are removed.
            session: whose variables they are, by their names, as for a `tf.compat.v1.train.Saver`.
            objects: by name, as for `tf.train.Checkpoint`: `model=model, optimizer=optimizer`. Not with a session.

        Raises:
            CheckpointError: the folder is on no file system, or a graph is being built and no session is given.
        """
        if session is not None:
            if objects:
                raise ValueError(f"{', '.join(objects)}: a session is saved by its variables' names, and no objects.")
            return SessionCheckpoints(self._run, folder, keep, session)
        if not tf.executing_eagerly():
            raise CheckpointError(
                "ad.checkpoint saves objects of eager TensorFlow, and a graph is being built. Give it the graph's "
                "session, ad.checkpoint(folder, session=session), or save it by a tf.compat.v1.train.Saver."
            )
        return Checkpoints(self._run, folder, keep, objects)

    @property
    def steps_done(self) -> int:
        """How many training steps were made so far, by the runs that this one goes on from too.

        With `checkpoint` in the YAML a script's own loop begins there: `for step in range(ad.steps_done, 10_000)`. A
        loop of several training steps counts each.
        """
        if self._automatic is not None:
            self._automatic.asked_for_steps(sys._getframe(1))
        return self._run.step

    def checkpoint_callback(
        self,
        folder: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        keep: int = 3,
    ) -> CheckpointCallback:
        """A callback for `fit` that saves the model, its optimizer, the callbacks' states and where `fit` is.

        A `fit` that is given one goes on where the last checkpoint in the folder was made, at its epoch and batch.

        Args:
            folder: of the checkpoints; as for `checkpoint`.
            every_steps: after how many training steps it saves; None: not by them.
            every_minutes: after how many minutes, by the chief's clock; likewise.
            keep: how many checkpoints stay there.

        Raises:
            CheckpointError: the folder is on no file system.
        """
        return CheckpointCallback(self._run, folder, keep, every_steps, every_minutes)

    def _share_files(self) -> None:
        if self._run.workers > 1:
            share_files(self._run.chief.write)

    def _whole_in_graph(self, sums: AllReduceNotes) -> WholeInGraph | None:
        """Gives losses of graphs the whole batch's sums and means; None where replicas get no parts of a batch."""
        return WholeInGraph(sums) if self._run.spec.splits_batches else None

    def _noted(self) -> tuple[GradientNotes, AllReduceNotes] | None:
        """What was noted in the scope; None outside of any."""
        return None if self._notes is None or self._sums is None else (self._notes, self._sums)

    def _is_in_scope(self, graph: object) -> bool:
        """Whether a graph's gradients were made in the scope."""
        return self._notes is not None and any(call.graph is graph for call in self._notes.calls)

    def on_every_worker(self, callback: Callback) -> Callback:
        """Lets a callback that records act on every worker; by default `fit` calls it on the chief alone.

        ```python
        model.fit(x, y, callbacks=[ad.on_every_worker(keras.callbacks.CSVLogger(f"log{ad.worker_index}.csv"))])
        ```

        Args:
            callback: one of Keras that writes files, or one of a tracker (mlflow, wandb). All other callbacks act on
                every worker anyway.

        Returns:
            The callback.
        """
        return on_every_worker(callback)

    # -- end -------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        if os.getpid() != self._process:
            return  # forked from the worker's process, whose run goes on
        try:
            if not watch_script_end().is_bad:
                self._alone.tell_at_end(self._run.has_idle_workers)
                if self._run.deals_files and not self._run.coordination.has_agreed:
                    log.warning("%s", NOTHING_DEALT, extra=ALIKE_EVERYWHERE)
            if not self._finishes_well() and self._run.spec.max_restarts and self._run.recorder is None:
                self._restart()
        except SystemExit:
            return  # told to end (SIGTERM), by which the process ends
        except KeyboardInterrupt:
            watch_script_end().end_by(signal.SIGINT)

    def _finishes_well(self) -> bool:
        try:
            self._run.end.finish()
        except AutoDistError as error:
            self._run.end.error = error
            log.error("%s", error)
            watch_script_end().end_by(signal.SIGTERM)
            return False
        return not watch_script_end().is_bad

    def _restart(self) -> None:
        run = self._run
        lost = run.end.lost(run.step + 1 if run.have_joined else None, run.saved_step, run.saved_as)
        if lost is not None:
            restart(lost, run.spec)
