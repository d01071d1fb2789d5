"""Distributed session: replaces `tf.compat.v1.Session` in a TensorFlow 1 script."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Self

import numpy as np
import tensorflow as tf
from tensorflow.python.client.session import SessionInterface  # a Saver accepts only subclasses of it
from tensorflow.python.framework import stack  # the stack of default sessions, used by Tensor.eval

from autodist.batch.axis import axis_within, require_axis, require_mapping
from autodist.capture.gradients import GradientNotes
from autodist.capture.graph_mode import CapturedGraph
from autodist.capture.training_requirements import require_training, warn_unordered_updates
from autodist.errors import CaptureError, EmptyBatchError
from autodist.kernels import LOCAL_KERNELS
from autodist.logs.quiet import quiet_tensorflow
from autodist.runs.metrics.step_metrics import NOT_MEASURED
from autodist.runs.run import Run
from autodist.runtime.runnable import RunMetadata, RunOptions
from autodist.runtime.variables import StoredVariable
from autodist.sessions.batches import SessionBatches
from autodist.sessions.feeds import SessionFeeds, disagree
from autodist.sessions.initial_values import InitialValues, resume
from autodist.sessions.programs import Prepared, SessionPlan, SessionPrograms
from autodist.sessions.requests import ABSENT, Request, Requests, check_options, expanded, refuse_partial_runs
from autodist.sessions.runs import SessionRuns
from autodist.sessions.sparse_placeholders import axes_by_placeholder, fed_by_rows, placeholder_of
from autodist.tf_compat.tf1_scripts import within_plain_shapes


class DistributedSession(SessionInterface):
    """Runs a graph on all replicas; made by `AutoDist.create_distributed_session`.

    Feeds are this worker's own data, split over its replicas along the batch axis: the first axis of a placeholder, if
    its length is None. Fetches are combined over this worker's replicas. A worker without replicas ignores its feeds,
    and its fetches have no rows or are 0.

    Args:
        run: the run.
        captured: the graph.
        notes: the calls of `gradient` in the scope; later calls are an error. None: later calls belong to later
            sessions.
        batch_axis: by placeholder (or its name), another axis to split, negative ones counted from the last; None:
            every replica gets the whole value.
        shared: names of tensors that every worker feeds with the same value and keeps its share of.
        earlier: a session of an earlier state of the same graph, to share its values; default: separate values.
    """

    def __init__(
        self,
        run: Run,
        captured: CapturedGraph,
        notes: GradientNotes | None,
        batch_axis: Mapping[Any, int | None] | None = None,
        shared: frozenset[str] = frozenset(),
        earlier: DistributedSession | None = None,
    ) -> None:
        self._run, self._captured, self._notes = run, captured, notes
        self._version = captured.graph.version
        self._requests = Requests(captured.graph)
        axes = axes_by_placeholder(require_mapping(batch_axis, "placeholders"), captured.graph)
        named = dict(itertools.starmap(self._named_axis, axes))
        whole = captured.whole()
        feeds = SessionFeeds(run.spec, run.index, named, frozenset(v.shape for v in captured.variables), shared)
        self._feeds = feeds.with_rows(whole, captured, even_alone=run.recorder is not None and run.recorder.permutes)
        require_training(captured, whole)
        warn_unordered_updates(whole)
        self._batches = SessionBatches(run.spec, captured, lambda step: self._plan.program(step, LOCAL_KERNELS))
        self._batches.require_divisible(whole)
        self._feeds.require_open_axes(whole, captured)
        self._plan: SessionPlan = SessionPlan(run, captured, whole, None if earlier is None else earlier._plan)
        self._initial_values: InitialValues = InitialValues(
            run,
            captured,
            lambda step, kernels: self._plan.program(self._plan.placed(step), kernels),
            set() if earlier is None else earlier._initial_values.settled,
        )
        self._programs = SessionPrograms(run, captured, self._feeds, self._plan, self._initial_values)
        self._runs = SessionRuns(run, self._feeds)
        self._prepared: dict[Any, Prepared] = {}
        self._is_resumed = False
        self._default: AbstractContextManager[Any] | None = None

    @property
    def graph(self) -> tf.Graph:
        """The graph that it runs."""
        return self._captured.graph

    @property
    def graph_def(self) -> tf.compat.v1.GraphDef:
        """The script's graph as a protocol buffer."""
        return self.graph.as_graph_def()

    @property
    def sess_str(self) -> str:
        """Target of the server that it runs on; empty with one worker."""
        return str(self._run.graph_runners.control.session.sess_str)

    @within_plain_shapes
    def run(
        self,
        fetches: Any,
        feed_dict: Mapping[Any, Any] | None = None,
        options: RunOptions | None = None,
        run_metadata: RunMetadata | None = None,
    ) -> Any:
        """Runs `fetches`, as `tf.compat.v1.Session.run` does.

        Args:
            fetches: a tensor, an operation, a variable, a name, or any nest of these.
            feed_dict: values of placeholders or other tensors.
            options: TensorFlow's options for this worker's run: a time limit, tracing. A run ended by a time limit
                counts as a step that this worker has missed.
            run_metadata: a `tf.compat.v1.RunMetadata`, filled as requested by `options` for this worker's run, with the
                node names of the rewritten step. Other workers' runs are not included; the environment variable
                AUTODIST_TRACE traces each worker.

        Returns:
            The values in the structure of `fetches`; None for operations.

        Raises:
            CaptureError: variables or gradients were added after the session was made, or an input cannot be split, or
                `options` name nodes of the script's graph.
            UnevenBatchError: inputs have different numbers of examples, or there are none and the run needs one.
            WorkerFailedError: another worker failed.
            ClusterError: this worker failed in an earlier run.
        """
        with self._run.failed_step.guarding(is_step=False, is_before=True):
            self._require_same_training()
            check_options(options, run_metadata)
            feeds = {} if feed_dict is None else fed_by_rows(feed_dict)
            request = self._requests.of(fetches, feeds)
            arrays = request.arrays(feeds.values())
        known = self._prepared.get(request.key(arrays))
        if known is not None and known.trains:
            self._run.observer.before_step(known)
        with self._run.failed_step.guarding(but=tf.errors.OutOfRangeError):
            arrays |= self._batches.next_for(request, arrays)
        if known is not None and known.is_local and disagree(arrays, known.axes):
            known = None  # prepared again, for computing the whole batch
        quiet = nullcontext() if known is not None else quiet_tensorflow()
        try:
            with self._run.failed_step.guarding(but=EmptyBatchError), quiet:
                prepared = self._prepare(request, arrays) if known is None else known
                self._run.is_in_step = prepared.trains
                metrics = self._run.metrics if prepared.trains else None
                measured = NOT_MEASURED if metrics is None else metrics.begin(prepared.name)
                if options is None and run_metadata is None:
                    options, run_metadata = measured.options, measured.metadata
                with measured.running():
                    values, examples = self._runs.make(prepared, request, arrays, options, run_metadata)
            self._run.input_consistency.report_faults()
            if known is None and not (prepared.sets or prepared.is_read_only):
                self._run.startup.finish()
            if prepared.trains:
                self._run.count_steps(1, ((v.name, self._plan.stored(v)) for v in self._captured.variables))
            if metrics is not None:
                metrics.end(measured, 1, examples)
        finally:
            self._run.is_in_step = False
        if prepared.trains and self._run.recorder is not None:
            self._run.recorder.after_step(self._captured.whole(), self._run.index, self._values, dict)
        return request.filled(fetches, values)

    def _require_same_training(self) -> None:
        """Checks that no variables or gradients were added after the session was made.

        Raises:
            CaptureError: some were added.
        """
        if self.graph.version != self._version:
            if self._notes is not None:
                self._captured.require_same_training(self._notes.calls)
            self._version = self.graph.version

    def _prepare(self, request: Request, arrays: Mapping[tf.Tensor, np.ndarray]) -> Prepared:
        """Prepares the program of a new request."""
        prepared = self._prepared[request.key(arrays)] = self._programs.prepare(request.elements, arrays)
        self._resume(prepared)
        return prepared

    def _resume(self, prepared: Prepared) -> None:
        """Restores variables before the first training run, which comes after the initializing runs."""
        if not prepared.trains:
            return
        if not self._is_resumed:
            self._is_resumed = True
            resume(self._run, {v.name: self._plan.stored(v) for v in self._captured.variables})
            if self._run.resumed:
                self._batches.warn_iterators_start_over(self._captured.whole(), self._run.step)
        self._run.observer.before_step(prepared)

    @within_plain_shapes
    def saved_variables(self) -> dict[str, StoredVariable]:
        """Returns the session's variables that a Saver of the graph would save, by name."""
        saved = {
            v.handle.op.name: v.op.name for v in self.graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
        }
        return {saved[v.handle]: self._plan.stored(v) for v in self._captured.variables if v.handle in saved}

    @within_plain_shapes
    def give_initial_values(self) -> None:
        """Initializes variables that no run has set; all workers call it."""
        self._initial_values.give()

    def mark_set(self) -> None:
        """Marks all variables as set outside of runs."""
        self._initial_values.settled |= {v.handle for v in self._captured.variables}

    def _values(self) -> dict[str, np.ndarray]:
        """Returns the values of the graph's variables, by name."""
        listed = {v.handle.op.name: v for v in self.graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)}
        values: dict[str, np.ndarray] = self.run(
            {v.name: listed[v.handle] for v in self._captured.variables if v.handle in listed}
        )
        return values

    def make_callable(
        self, fetches: Any, feed_list: Sequence[Any] | None = None, accept_options: bool = False
    ) -> Callable[..., Any]:
        """Returns a callable that runs `fetches`, as `tf.compat.v1.Session.make_callable` does.

        Args:
            fetches: fetches as for `run`.
            feed_list: the feeds, in the order of the callable's arguments.
            accept_options: True if the callable accepts `options` and `run_metadata`.

        Raises:
            TypeError, CaptureError: `fetches` or `feed_list` cannot be run or fed.
        """
        if not isinstance(feed_list, list | tuple | None):
            raise TypeError(f"feed_list is {feed_list!r}; it must be a list or a tuple.")
        for fetch in tf.nest.flatten(expanded(fetches)):
            if fetch is not ABSENT:
                self._requests.element(fetch)
        keys = [self._requests.tensor(key) if placeholder_of(key) is None else key for key in feed_list or ()]

        def call(*values: Any, **options: Any) -> Any:
            if len(values) != len(keys):
                raise TypeError(f"{len(keys)} values are fed in each run, and {len(values)} were passed.")
            if options and not accept_options:
                raise TypeError(f"{', '.join(options)}: use make_callable(accept_options=True) to pass these.")
            return self.run(fetches, dict(zip(keys, values, strict=True)), **options)

        return call

    partial_run_setup = partial_run = refuse_partial_runs

    def _named_axis(self, key: Any, axis: Any) -> tuple[str, int | None]:
        """Returns the name of a tensor in `batch_axis`, and its axis."""
        try:
            tensor = self._requests.tensor(key)
        except (KeyError, TypeError, ValueError) as error:
            raise CaptureError(
                f"batch_axis names {key!r}, which is no tensor of the session's graph ({error}); use a placeholder or "
                "its name."
            ) from error
        required = require_axis(axis, tensor.name)
        if required is None or tensor.shape.rank is None:
            return tensor.name, required
        return tensor.name, axis_within(required, tensor.shape.rank, tensor.name)

    # -- interface of tf.compat.v1.Session -------------------------------------------------------------------------

    def as_default(self) -> AbstractContextManager[Any]:
        """Makes it the session that `Tensor.eval` and `Operation.run` use."""
        return stack.default_session(self)

    def close(self) -> None:
        """Does nothing: other workers may still read this worker's values until the script ends."""

    def __enter__(self) -> Self:
        self._default = self.as_default()
        self._default.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._default is not None:
            self._default.__exit__(kind, error, trace)
            self._default = None
