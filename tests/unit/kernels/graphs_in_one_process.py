"""TensorFlow 1 graphs: every worker's rewritten session run, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from autodist.capture.graph_mode import CapturedGraph
from autodist.graph.names import node_of
from autodist.graph.step import EXAMPLES, Step
from autodist.kernels import KERNELS, SETTING_KERNELS, Context, Fetching, Kernel, find_holders, only_sets, rewrite
from autodist.proto import strategy_pb2
from tests.unit.kernels.in_one_process import in_one_session, transfers_of
from tests.unit.kernels.without_stacks import without_stacks

v1 = tf.compat.v1


@dataclass(frozen=True)
class Run:
    """The run of one worker."""

    outputs: list[str]
    targets: list[tf.Operation]
    feeds: dict[str, np.ndarray]


class Cluster:
    """The rewritten steps of all workers of a graph's session, in one session."""

    def __init__(
        self, graph: tf.Graph, notes: Sequence, plan: Callable[[Step], strategy_pb2.Strategy], sums: Sequence = ()
    ) -> None:
        self.captured = CapturedGraph.of(graph, notes, sums)
        whole = self.captured.whole()
        self.strategy = plan(whole)
        self.workers = Context(self.strategy, 0).workers
        self.holders = find_holders(whole, self.strategy)
        self.graph = tf.Graph()
        self.session = v1.Session(graph=self.graph)
        self._count = 0

    def run(
        self, outputs: Sequence[str] = (), targets: Sequence[str] = (), fetches_alike: bool = False, **feeds: np.ndarray
    ) -> list[list]:
        """Returns each worker's fetches; runs that only initialise variables run first on the chief."""
        fed = {f"{name}:0": value for name, value in feeds.items()}
        inputs = {name: self._axis(name) for name in fed}
        step = replace(self.captured.step(outputs, targets, inputs), holders=self.holders)
        sets = only_sets(step)
        contexts = [
            Context(self.strategy, w, Fetching.BY_ALL if fetches_alike else Fetching.BY_EACH)
            for w in range(self.workers)
        ]
        with without_stacks():
            runs = [self._add(step, context, SETTING_KERNELS if sets else KERNELS, fed) for context in contexts]
        return [self._run([one])[0] for one in runs] if sets else self._run(runs)

    def _axis(self, name: str) -> int | None:
        """As a session has it: along the first axis if the placeholder leaves it open."""
        shape = self.captured.graph.get_tensor_by_name(name).shape
        return 0 if shape.rank and shape[0] is None else None

    def _add(self, step: Step, context: Context, kernels: Sequence[Kernel], fed: Mapping[str, np.ndarray]) -> Run:
        made, worker = rewrite(step, context, kernels=kernels), context.worker
        self._count += 1
        prefix = f"run_{self._count}/"
        definition = in_one_session(made.graph_def)
        for node in definition.node:
            if node.op == "Enter":  # frames of two workers are two
                node.attr["frame_name"].s = prefix.encode() + node.attr["frame_name"].s
        with self.graph.as_default():
            tf.import_graph_def(definition, name=prefix.rstrip("/"))
        part = {
            prefix + name: value if self._axis(name) is None else np.array_split(value, self.workers)[worker]
            for name, value in fed.items()
        }
        if node_of(EXAMPLES) in {node.name for node in made.graph_def.node}:
            part[prefix + EXAMPLES] = len(next(iter(part.values())))
        names = (*made.targets, *transfers_of(made))
        targets = [self.graph.get_operation_by_name(prefix + name) for name in names]
        return Run([prefix + name for name in made.outputs], targets, part)

    def _run(self, runs: Sequence[Run]) -> list[list]:
        feeds = {name: value for run in runs for name, value in run.feeds.items()}
        fetches = [[run.outputs, run.targets] for run in runs]
        options = v1.RunOptions(timeout_in_ms=30_000)
        return [outputs for outputs, _ in self.session.run(fetches, feeds, options=options)]
