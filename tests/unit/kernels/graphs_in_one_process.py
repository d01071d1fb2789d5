"""TensorFlow 1 graphs: every worker's rewritten session run, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from autodist.capture.graph_mode import CapturedGraph
from autodist.graph.names import node_of
from autodist.graph.step import EXAMPLES, Step
from autodist.kernels import KERNELS, SETTING_KERNELS, Context, Fetching, find_holders, only_sets, rewrite
from autodist.proto import strategy_pb2
from tests.unit.kernels.in_one_process import rewritten_by
from tests.unit.kernels.in_one_session import in_one_session, transfers_of
from tests.unit.kernels.without_stacks import without_stacks

v1 = tf.compat.v1


@dataclass(frozen=True)
class Run:
    """The run of one worker: its nodes begin with the prefix."""

    worker: int
    prefix: str
    outputs: list[str]
    targets: list[tf.Operation]
    counts_examples: bool


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
        config = v1.ConfigProto()
        config.graph_options.rewrite_options.disable_meta_optimizer = True  # it takes longer than these small steps
        self.session = v1.Session(graph=self.graph, config=config)
        self._runs: dict[tuple, list[list[Run]]] = {}
        self._count = 0

    def run(
        self, outputs: Sequence[str] = (), targets: Sequence[str] = (), fetches_alike: bool = False, **feeds: np.ndarray
    ) -> list[list]:
        """Returns each worker's fetches; runs that only initialise variables run first on the chief.

        As in a session, the runs of the same fetches and feeds are rewritten once.
        """
        asked = (tuple(outputs), tuple(targets), fetches_alike, tuple(feeds))
        if asked not in self._runs:
            self._runs[asked] = self._made(*asked)
        return [fetched for runs in self._runs[asked] for fetched in self._run(runs, feeds)]

    def _made(
        self, outputs: Sequence[str], targets: Sequence[str], fetches_alike: bool, fed: Sequence[str]
    ) -> list[list[Run]]:
        """Returns the runs of all workers, in groups that run together."""
        inputs = {f"{name}:0": self._axis(name) for name in fed}
        step = replace(self.captured.step(outputs, targets, inputs), holders=self.holders)
        sets = only_sets(step)
        contexts = [
            Context(self.strategy, w, Fetching.BY_ALL if fetches_alike else Fetching.BY_EACH)
            for w in range(self.workers)
        ]
        with without_stacks():
            made = (
                [rewrite(step, context, kernels=SETTING_KERNELS) for context in contexts]
                if sets
                else rewritten_by(step, contexts, KERNELS)
            )
            runs = [self._add(worker, one) for worker, one in enumerate(made)]
        return [[run] for run in runs] if sets else [runs]

    def _axis(self, name: str) -> int | None:
        """As a session has it: along the first axis if the placeholder leaves it open."""
        shape = self.captured.graph.get_tensor_by_name(f"{name}:0").shape
        return 0 if shape.rank and shape[0] is None else None

    def _add(self, worker: int, made: Step) -> Run:
        self._count += 1
        prefix = f"run_{self._count}/"
        definition = in_one_session(made.graph_def)
        for node in definition.node:
            if node.op == "Enter":  # frames of two workers are two
                node.attr["frame_name"].s = prefix.encode() + node.attr["frame_name"].s
        with self.graph.as_default():
            tf.import_graph_def(definition, name=prefix.rstrip("/"))
        names = (*made.targets, *transfers_of(made))
        targets = [self.graph.get_operation_by_name(prefix + name) for name in names]
        counts_examples = node_of(EXAMPLES) in {node.name for node in made.graph_def.node}
        return Run(worker, prefix, [prefix + name for name in made.outputs], targets, counts_examples)

    def _run(self, runs: Sequence[Run], feeds: Mapping[str, np.ndarray]) -> list[list]:
        fed = {name: value for run in runs for name, value in self._part(run, feeds).items()}
        fetches = [[run.outputs, run.targets] for run in runs]
        options = v1.RunOptions(timeout_in_ms=30_000)
        return [outputs for outputs, _ in self.session.run(fetches, fed, options=options)]

    def _part(self, run: Run, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns what a worker feeds."""
        part = {
            f"{run.prefix}{name}:0": value
            if self._axis(name) is None
            else np.array_split(value, self.workers)[run.worker]
            for name, value in feeds.items()
        }
        if run.counts_examples:
            part[run.prefix + EXAMPLES] = len(next(iter(part.values())))
        return part
