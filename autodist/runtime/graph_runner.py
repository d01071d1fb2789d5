"""Engine: one TensorFlow graph and one session in this process, which runs what is added to it."""

from __future__ import annotations

import ctypes
import pathlib
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from autodist.graph.imported import ImportedGraph
from autodist.runtime.clocks import against
from autodist.runtime.direct_run import DirectRun
from autodist.runtime.timeline import TracedRuns, shared_queues

COLLECTIVE_KEY = 1
"""The graph key of every run that holds collectives, by which all workers share step ids in those runs alone."""


class GraphRunner:
    """A graph and its session.

    Args:
        target: of the in-process server; "" where there is none.
        config: of the session.
    """

    def __init__(self, target: str, config: tf.compat.v1.ConfigProto) -> None:
        self.graph = ImportedGraph()
        self.session = tf.compat.v1.Session(target, graph=self.graph, config=config)
        self._lock = threading.Lock()
        self._closed = False

    def callable(
        self,
        outputs: Sequence[tf.Tensor],
        operations: Sequence[tf.Operation],
        feeds: Sequence[str],
        has_collectives: bool = False,
        trace: pathlib.Path | None = None,
    ) -> Callable[..., list[np.ndarray]]:
        """What runs `operations` and returns the values of `outputs`, given a value for each of `feeds`.

        Args:
            outputs: tensors.
            operations: what runs besides.
            feeds: names of tensors that take values.
            has_collectives: whether other workers' runs take part in this one's.
            trace: file for a trace of one run; None: no run is traced.
        """
        options = _options(has_collectives)
        if trace is not None:
            run = self.callable_with_options(outputs, operations, feeds, has_collectives)
            return TracedRuns(run, options, trace, lambda: shared_queues(self.graph), self._about)
        taking = [self.graph.get_tensor_by_name(name) for name in feeds]
        return DirectRun(self.session, outputs, operations, taking, options)

    def _about(self) -> dict[str, Any]:
        """What a trace says besides: of how many workers it is one, and how far its clock is ahead of the chief's."""
        told = {"machine": socket.gethostname(), "workers": 1, "clock_ahead": 0.0, "clock_uncertainty": 0.0}
        chiefs, others = [], set()
        for device in self.session.list_devices():
            place = tf.DeviceSpec.from_string(device.name)
            others.add(place.task)
            if (place.task, place.device_type) == (0, "CPU"):
                chiefs.append(device.name)
        if len(others) > 1:
            with self._lock, self.graph.as_default(), tf.device(chiefs[0]):
                now = tf.timestamp()
            clock = against(lambda: float(self.session.run(now)))
            told |= {"workers": len(others), "clock_ahead": clock.ahead, "clock_uncertainty": clock.uncertainty}
        return told

    def callable_with_options(
        self,
        outputs: Sequence[tf.Tensor],
        operations: Sequence[tf.Operation],
        feeds: Sequence[str],
        has_collectives: bool,
    ) -> Callable[..., list[np.ndarray]]:
        """As `callable`; what it gives also takes `options` and `run_metadata`, as a session's `run` does."""
        run = self.session.make_callable([outputs, operations], feed_list=list(feeds), accept_options=True)

        def call(*values: Any, options: Any = None, run_metadata: Any = None) -> Any:
            merged = _options(has_collectives)
            if options is not None:
                merged.MergeFrom(options)
            found: list[np.ndarray] = run(*values, options=merged, run_metadata=run_metadata)[0]
            return found

        return call

    def close(self) -> None:
        """Closes the session. May be called twice."""
        if not self._closed:
            self._closed = True
            self.session.close()

    def abandon(self) -> None:
        """Leaves the session as it is till the process ends: closing it, at exit too, waits for runs that never end."""
        if not self._closed:
            self._closed = True
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.session))


def _options(has_collectives: bool) -> tf.compat.v1.RunOptions:
    options = tf.compat.v1.RunOptions()
    if has_collectives:
        options.experimental.collective_graph_key = COLLECTIVE_KEY
    return options
