"""Graph runner: one TensorFlow graph and one session in this process, to which steps are added."""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2

from autodist.errors import ClusterError
from autodist.graph.imported import ImportedGraph
from autodist.runtime.clocks import measure_offset
from autodist.runtime.inbox_loops import InboxLoops, keep_open
from autodist.runtime.persistent_buffers import PersistentBuffers
from autodist.runtime.reserved_threads import ReservedThreads
from autodist.runtime.timeline import TracedRuns, TraceFile, shared_queues
from autodist.waits import join_all

COLLECTIVE_KEY = 1
"""Graph key of every run with collectives; workers share step ids in these runs only."""

_INBOX_ENDED = (tf.errors.OutOfRangeError, tf.errors.CancelledError)
"""Errors of a run that waits for a message, if its inbox is closed because the source is lost."""


class GraphRunner:
    """A graph and its session.

    Args:
        target: target of the in-process server; "" without a server.
        config: config of the session.
        lost: returns the error of another worker's loss that made a run fail; None if there was none.
    """

    def __init__(
        self,
        target: str,
        config: tf.compat.v1.ConfigProto,
        lost: Callable[[], BaseException | None] = lambda: None,
    ) -> None:
        self.graph = ImportedGraph()
        self.session = tf.compat.v1.Session(target, graph=self.graph, config=config)
        self._lost = lost
        self._lock = threading.Lock()
        self._closed = False

    def callable(
        self,
        outputs: Sequence[tf.Tensor],
        operations: Sequence[tf.Operation],
        feeds: Sequence[str],
        has_collectives: bool = False,
        trace: TraceFile | None = None,
    ) -> Callable[..., list[np.ndarray]]:
        """Returns a callable that runs `operations` and returns the values of `outputs`, with a value for each feed.

        Args:
            outputs: tensors.
            operations: targets that run in addition.
            feeds: names of the tensors that are fed.
            has_collectives: True if other workers' runs take part in this run.
            trace: file for a trace of one run; None: no run is traced.
        """
        options = _options(has_collectives)
        if trace is not None:
            run = self.callable_with_options(outputs, operations, feeds, has_collectives)
            return TracedRuns(run, options, trace, lambda: shared_queues(self.graph), self._metadata)
        taking = [self.graph.get_tensor_by_name(name) for name in feeds]
        return DirectRun(self.session, outputs, operations, taking, options, self._lost)

    def _metadata(self) -> dict[str, Any]:
        """Returns a trace's metadata: the number of workers, and the offset of its clock from the chief's."""
        metadata = {"machine": socket.gethostname(), "workers": 1, "clock_ahead": 0.0, "clock_uncertainty": 0.0}
        chiefs, others = [], set()
        for device in self.session.list_devices():
            place = tf.DeviceSpec.from_string(device.name)
            others.add(place.task)
            if (place.task, place.device_type) == (0, "CPU"):
                chiefs.append(device.name)
        if len(others) > 1:
            with self._lock, self.graph.as_default(), tf.device(chiefs[0]):
                now = tf.timestamp()
            chief = measure_offset(lambda: float(self.session.run(now)))
            metadata |= {"workers": len(others), "clock_ahead": -chief.ahead, "clock_uncertainty": chief.uncertainty}
        return metadata

    def callable_with_options(
        self,
        outputs: Sequence[tf.Tensor],
        operations: Sequence[tf.Operation],
        feeds: Sequence[str],
        has_collectives: bool,
    ) -> Callable[..., list[np.ndarray]]:
        """Like `callable`; the result also accepts `options` and `run_metadata`, as a session's `run` does."""
        run = self.session.make_callable([outputs, operations], feed_list=list(feeds), accept_options=True)

        def call(*values: Any, options: Any = None, run_metadata: Any = None) -> Any:
            merged = _options(has_collectives)
            if options is not None:
                merged.MergeFrom(options)
            try:
                found: list[np.ndarray] = run(*values, options=merged, run_metadata=run_metadata)[0]
            except _INBOX_ENDED as error:
                raise self._lost() or error from None
            return found

        return call

    def close(self) -> None:
        """Closes the session. May be called twice."""
        if not self._closed:
            self._closed = True
            self.session.close()

    def abandon(self) -> None:
        """Keeps the session open until the process ends (`keep_open`)."""
        if not self._closed:
            self._closed = True
            keep_open(self.session)


def _options(has_collectives: bool) -> tf.compat.v1.RunOptions:
    options = tf.compat.v1.RunOptions()
    if has_collectives:
        options.experimental.collective_graph_key = COLLECTIVE_KEY
    return options


class DirectRun:
    """Runs the same fetches repeatedly, with values for the same feeds.

    `Session.make_callable` with feeds is `Session.run`, which inspects every fetch and feed in each call: half of the
    time of a small model's step. A callable made from `CallableOptions` skips that, and also the checks of the fed
    values, which this class makes.

    Args:
        session: the session that runs the fetches.
        outputs: tensors that a run returns.
        operations: targets that run without a result.
        feeds: tensors that are fed.
        options: options of every run.
        lost: returns the error of another worker's loss that made a run fail; None if there was none.
    """

    def __init__(
        self,
        session: tf.compat.v1.Session,
        outputs: Sequence[tf.Tensor],
        operations: Sequence[tf.Operation],
        feeds: Sequence[tf.Tensor],
        options: tf.compat.v1.RunOptions,
        lost: Callable[[], BaseException | None] = lambda: None,
    ) -> None:
        different = list(dict.fromkeys(t.name for t in outputs))
        self._positions = [different.index(t.name) for t in outputs]
        self._feeds = [_Feed(t) for t in feeds]
        callable_options = config_pb2.CallableOptions(
            feed=[t.name for t in feeds], fetch=different, target=[op.name for op in operations], run_options=options
        )
        # TensorFlow refuses an empty run; another worker's part of a run may be empty.
        is_nothing = not outputs and not operations
        self._session, self._lost = session, lost
        self._run = (lambda *values: []) if is_nothing else session._make_callable_from_options(callable_options)

    def __call__(self, *values: Any) -> list[np.ndarray]:
        """Returns the values of the outputs.

        Raises:
            ValueError: a value's shape does not match its tensor.
            ClusterError: the session is closed, because the run has ended.
        """
        try:
            values_found = self._run(*[feed.taken(v) for feed, v in zip(self._feeds, values, strict=True)])
        except _INBOX_ENDED as error:
            cause = self._lost() or error
            if not isinstance(cause, tf.errors.CancelledError) or not self._session._closed:
                raise cause from None
            raise ClusterError(
                "The run has ended, and no further step can run. An exit handler registered before `AutoDist(…)` is "
                "called after the run's end: register it later, or make the step earlier."
            ) from None
        return [values_found[k] for k in self._positions]


class _Feed:
    """A tensor that is fed in each run."""

    def __init__(self, tensor: tf.Tensor) -> None:
        self._name, self._shape, self._dtype = tensor.name, tensor.shape, np.dtype(tensor.dtype.as_numpy_dtype)
        self._last_shape: tuple[int, ...] | None = None

    def taken(self, value: Any) -> np.ndarray:
        array = np.asarray(value, self._dtype)
        if array.shape != self._last_shape:  # consecutive runs usually have the same shape
            if not self._shape.is_compatible_with(array.shape):
                raise ValueError(f"{self._name} has the shape {self._shape} and cannot take a value of {array.shape}.")
            self._last_shape = array.shape
        return array


class GraphRunners:
    """The graph runners of a worker: steps run on its server, each in its own session.

    TensorFlow prepares a run from the complete graph of its session, so one session for all steps would become slower
    with each step. The sessions of a server share variables, queues and tables. Without a server these belong to a
    session, so one session runs all steps.

    Args:
        target: target of the in-process server; "" with one worker, which has no server.
        config: config of the sessions.
        worker: this worker.
        workers: number of workers.
    """

    def __init__(self, target: str, config: tf.compat.v1.ConfigProto, worker: int = 0, workers: int = 1) -> None:
        self._target, self._config = target, config
        self._lock = threading.Lock()
        self._initialized: set[str] = set()
        self._steps = 0
        plain = _without_optimization(config) if target else config
        self.control = GraphRunner(target, plain, lambda: self.inbox_loops.failure)
        """Runs small graphs: control messages, and transfers of variable values."""
        self._opened = [self.control]
        self.ending_threads = ReservedThreads()
        """Threads that close sessions."""
        for _ in range(3):  # two calls of `close`, and the session of `control`
            self.ending_threads.reserve()
        self.inbox_loops = InboxLoops(
            worker, workers, lambda graph: tf.compat.v1.Session(target, graph=graph, config=plain), self.ending_threads
        )
        """Brings the messages of other workers' steps."""
        self.persistent_buffers = PersistentBuffers()
        """Persistent buffers of the kernels on this worker."""

    def add(self, graph_def: tf.compat.v1.GraphDef) -> tuple[GraphRunner, str]:
        """Imports a step; returns its graph runner, and the prefix of its node names there."""
        with self._lock:
            self._steps += 1
            graph_runner = self.control
            if self._target:
                graph_runner = GraphRunner(self._target, self._config, lambda: self.inbox_loops.failure)
                self._opened.append(graph_runner)
                self.ending_threads.reserve()
            prefix = f"step_{self._steps}"
            graph_runner.graph.import_nodes(_with_own_queues(graph_def, prefix), prefix)
        return graph_runner, prefix + "/"

    def initialize(self, graph_runner: GraphRunner, operations: Mapping[str, str]) -> None:
        """Runs the initializers of a step whose key has not run yet; a key identifies the state that is set."""
        new = {key: name for key, name in operations.items() if key not in self._initialized}
        if new:
            first = [graph_runner.graph.get_operation_by_name(name) for name in new.values()]
            graph_runner.session.run(first)
            self._initialized.update(new)
            self.persistent_buffers.begin(graph_runner.session, first)

    def close(self, limit: float) -> None:
        """Closes the sessions, but not those of `inbox_loops`, for up to `limit` seconds. May be called twice.

        A session whose runs have used the server of a worker that does not respond may never be closed.
        """
        self._call_within(limit, [self._close_all])

    def _close_all(self) -> None:
        for graph_runner in reversed(self._opened):
            graph_runner.close()

    def abandon(self) -> None:
        """Keeps the sessions open until the process ends: closing one waits for runs that never end."""
        for graph_runner in self._opened:
            graph_runner.abandon()

    def end_runs(self, limit: float) -> None:
        """Ends the runs of abandoned sessions, as far as that is possible within `limit` seconds."""
        ends = [functools.partial(self.inbox_loops.close, limit), *(e.session.close for e in self._opened)]
        self._call_within(limit, ends)

    def _call_within(self, limit: float, ends: Sequence[Callable[[], object]]) -> None:
        """Calls functions concurrently; returns when all have returned, or after `limit` seconds."""
        join_all([self.ending_threads.start(end) for end in ends], limit)


def _with_own_queues(graph_def: tf.compat.v1.GraphDef, prefix: str) -> tf.compat.v1.GraphDef:
    """Returns a graph in which queues without a shared name have one of their own, which copies of a queue keep."""
    if all(node.op != "FIFOQueueV2" or node.attr["shared_name"].s for node in graph_def.node):
        return graph_def
    named = tf.compat.v1.GraphDef()
    named.CopyFrom(graph_def)
    for node in named.node:
        if node.op == "FIFOQueueV2" and not node.attr["shared_name"].s:
            node.attr["shared_name"].s = f"{prefix}/{node.name}".encode()
    return named


def _without_optimization(config: tf.compat.v1.ConfigProto) -> tf.compat.v1.ConfigProto:
    """Returns a config without graph optimization, for graphs that run a few times: optimizing takes longer."""
    changed = tf.compat.v1.ConfigProto()
    changed.CopyFrom(config)
    changed.graph_options.rewrite_options.disable_meta_optimizer = True
    changed.graph_options.optimizer_options.opt_level = tf.compat.v1.OptimizerOptions.L0
    return changed
