"""Engines: where rewritten steps run in this process, on the variables that all of them share."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import tensorflow as tf

from autodist.runtime.graph_runner import GraphRunner
from autodist.runtime.persistent_buffers import PersistentBuffers

_END_LIMIT = 0.5
"""Seconds for runs to end that are cancelled; what waits for a worker that is gone may never do."""


class GraphRunners:
    """Where steps run: on this worker's server, each in a session of its own.

    TensorFlow prepares a run from the whole graph of its session, so that a session for all steps would take longer for
    each the more of them there are. A server's sessions have the same variables, queues and tables. Without a server
    these are a session's own: one has all then.

    Args:
        target: of the in-process server; "" where there is one worker and no server.
        config: of the sessions.
    """

    def __init__(self, target: str, config: tf.compat.v1.ConfigProto) -> None:
        self._target, self._config = target, config
        self._lock = threading.Lock()
        self._initialized: set[str] = set()
        self._steps = 0
        self.beside = GraphRunner(target, _as_it_stands(config) if target else config)
        """Where runs what is small: what workers tell one another, and values that they give one another."""
        self._opened = [self.beside]
        self.memories = PersistentBuffers()
        """What kernels keep on this worker from step to step."""

    def add(self, graph_def: tf.compat.v1.GraphDef) -> tuple[GraphRunner, str]:
        """Imports a step; returns where it runs, and the prefix of its nodes' names there."""
        with self._lock:
            self._steps += 1
            graph_runner = self.beside
            if self._target:
                graph_runner = GraphRunner(self._target, self._config)
                self._opened.append(graph_runner)
            prefix = f"step_{self._steps}"
            graph_runner.graph.import_nodes(graph_def, prefix)
        return graph_runner, prefix + "/"

    def initialize(self, graph_runner: GraphRunner, operations: Mapping[str, str]) -> None:
        """Runs operations of a step, by a key that tells what each sets, unless one of that key ran before."""
        new = {key: name for key, name in operations.items() if key not in self._initialized}
        if new:
            first = [graph_runner.graph.get_operation_by_name(name) for name in new.values()]
            graph_runner.session.run(first)
            self._initialized.update(new)
            self.memories.begin(graph_runner.session, first)

    def close(self) -> None:
        """Closes the sessions. May be called twice."""
        for graph_runner in reversed(self._opened):
            graph_runner.close()

    def abandon(self) -> None:
        """Leaves the sessions as they are till the process ends: closing one waits for runs that never end."""
        for graph_runner in self._opened:
            graph_runner.abandon()

    def end_runs(self) -> None:
        """Ends what runs, as far as that is possible within a moment, in sessions that were abandoned."""
        closing = [threading.Thread(target=e.session.close, name="autodist-closing", daemon=True) for e in self._opened]
        for thread in closing:
            thread.start()
        deadline = time.monotonic() + _END_LIMIT
        for thread in closing:
            thread.join(max(0.0, deadline - time.monotonic()))


def _as_it_stands(config: tf.compat.v1.ConfigProto) -> tf.compat.v1.ConfigProto:
    """For graphs that run a few times each: making them better takes longer than they do."""
    changed = tf.compat.v1.ConfigProto()
    changed.CopyFrom(config)
    changed.graph_options.rewrite_options.disable_meta_optimizer = True
    changed.graph_options.optimizer_options.opt_level = tf.compat.v1.OptimizerOptions.L0
    return changed
