"""Random models over pipeline stages: for any data flow, a step ends, or is rejected before it begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autodist.errors import StrategyError
from autodist.graph.names import node_of
from autodist.graph.pipeline_schedule import SCHEDULES
from autodist.graph.step import Step
from autodist.graph.walks import reach
from autodist.kernels import KERNELS, Context
from autodist.kernels.base import run_pipeline
from autodist.kernels.pipelined.place_stages import PlaceStages
from autodist.proto import strategy_pb2
from tests.unit.kernels.in_one_process import CapturedFunction, assert_same, capture, one_device, train
from tests.unit.kernels.pipelined.models import pipelined

WIDTH = 3

BEFORE = tuple(takewhile(lambda kernel: not isinstance(kernel, PlaceStages), KERNELS))
"""The kernels whose result is the same on all workers of a pipeline."""


@dataclass(frozen=True)
class Drawn:
    """A model of layers.

    Attributes:
        reads: for each layer its summed inputs: earlier layers' outputs; 0 and -1 are the model's inputs.
        weights: for each layer the number of its weight; few weights are shared by two layers.
        returned: the layers whose outputs the step returns.
    """

    reads: tuple[frozenset[int], ...]
    weights: tuple[int, ...]
    returned: frozenset[int]

    def made(self) -> Callable[..., object]:
        """Returns the step, whose weights are named "v" and their number."""
        draw = np.random.default_rng(0)
        kernels = {k: tf.Variable(draw.normal(size=(WIDTH, WIDTH)) / 2, name=f"v{k}") for k in self.weights}

        def step(x, z):
            with tf.GradientTape() as tape:
                outputs = {0: x, -1: z}
                for k, (read, weight) in enumerate(zip(self.reads, self.weights, strict=True), start=1):
                    outputs[k] = tf.tanh(tf.add_n([outputs[one] for one in sorted(read)]) @ kernels[weight])
                loss = tf.reduce_mean(tf.square(outputs[len(self.reads)]))
                for k in sorted(self.returned):
                    loss += tf.reduce_mean(outputs[k])
            gradients = tape.gradient(loss, list(kernels.values()))
            for kernel, gradient in zip(kernels.values(), gradients, strict=True):
                if gradient is not None:
                    kernel.assign_sub(0.1 * gradient)
            return [loss, *(outputs[k] for k in sorted(self.returned))]

        return step


@st.composite
def models(draw):
    layers = draw(st.integers(2, 5))
    reads = [draw(st.sets(st.integers(-1, k), max_size=2)) | {k} for k in range(layers)]
    weights = [draw(st.sampled_from(sorted({k, max(k - 2, 0)}))) for k in range(layers)]
    weights[: layers // 2] = range(layers // 2)
    returned = draw(st.sets(st.integers(1, layers), max_size=2))
    return Drawn(tuple(map(frozenset, reads)), tuple(weights), frozenset(returned))


@dataclass(frozen=True)
class Laid:
    """The placement of a model in stages.

    Attributes:
        stages: number of stages.
        stage_of: each layer's stage, if its weight is not shared.
        micro_batches: of each pipeline.
        pipelines: number of data-parallel pipelines.
        schedule: the execution order.
        recompute: True if stages recompute their activations.
    """

    stages: int
    stage_of: tuple[int, ...]
    micro_batches: int
    pipelines: int
    schedule: str
    recompute: bool = False

    def strategy(self, captured: CapturedFunction) -> strategy_pb2.Strategy:
        stage_of = {v.name: self.stage_of[int(v.name.removeprefix("v"))] for v in captured.step.variables}
        said = (self.stages, self.micro_batches, self.schedule, self.pipelines, self.recompute)
        return pipelined(captured.step, stage_of, *said)

    def fits(self, model: Drawn) -> bool:
        """Returns True if no data flow backwards, and no layers share a weight."""
        return list(self.stage_of) == sorted(self.stage_of) and len(set(model.weights)) == len(model.weights)


@st.composite
def laid(draw, model: Drawn, most_micro_batches: int):
    layers = len(model.reads)
    stages = draw(st.integers(2, min(layers, 4)))
    rising = draw(st.booleans())
    stage_of = [k * stages // layers for k in range(layers)] if rising else draw(
        st.lists(st.integers(0, stages - 1), min_size=layers, max_size=layers)
    )  # fmt: skip
    micro_batches = draw(st.integers(1, most_micro_batches))
    pipelines = draw(st.integers(1, 2)) if micro_batches == 1 else 1
    schedule, recompute = draw(st.sampled_from(SCHEDULES)), draw(st.booleans())
    return Laid(stages, tuple(stage_of), micro_batches, pipelines, schedule, recompute)


def batch(rows: int) -> list[np.ndarray]:
    return [np.random.default_rng(seed).normal(size=(rows, WIDTH)) for seed in (9, 10)]


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), model=models(), rows=st.integers(1, 4))
def test_a_step_ends_as_on_one_device_or_is_refused(data, model, rows):
    lies, step = data.draw(laid(model, 5)), model.made()  # from four on they call functions
    batches = [batch(rows)] * 2
    captured = capture(step, *batches[0], is_global=True)
    try:
        found = train(captured, lies.strategy(captured), batches)
    except StrategyError:
        assert not lies.fits(model), "layers in their order are not refused"
        return
    assert_same(found, one_device(captured, step, batches), rtol=1e-9)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), model=models())
def test_no_worker_waits_for_ever_or_the_step_is_refused(data, model):
    captured = capture(model.made(), *batch(2), is_global=True)
    for _ in range(4):
        lies = data.draw(laid(model, 2))
        try:
            items = dealt_out(captured, lies.strategy(captured))
        except StrategyError:
            assert not lies.fits(model), "layers in their order are not refused"
            continue
        assert left_waiting(items) == []


def dealt_out(captured: CapturedFunction, strategy: strategy_pb2.Strategy) -> list[Step]:
    """The step of each worker as `PlaceStages` leaves it."""
    first = Context(strategy, 0)
    step = run_pipeline(BEFORE, captured.step, first)
    return [PlaceStages().apply(step, Context(strategy, worker)) for worker in range(first.workers)]


def left_waiting(items: Sequence[Step]) -> list[tuple[int, str]]:
    """Returns the nodes that never run when all workers make a step together.

    A node runs once all of its inputs and control inputs have run. A dequeue runs once an element was enqueued. An
    element that is never dequeued would block the next step.
    """
    needed = [
        reach([*map(node_of, step.outputs), *step.targets], step.graph_index.sources.__getitem__) for step in items
    ]
    puts = dict(_at_queues(items, needed, "QueueEnqueueV2"))
    takes = dict(_at_queues(items, needed, "QueueDequeueV2"))
    assert puts.keys() == takes.keys()
    put_for = {at: puts[queue] for queue, at in takes.items()}
    waits = {
        (worker, name): {(worker, source) for source in items[worker].graph_index.sources[name]}
        for worker, names in enumerate(needed) for name in names
    }  # fmt: skip
    for at, put in put_for.items():
        waits[at].add(put)
    readers: dict[tuple[int, str], list[tuple[int, str]]] = {at: [] for at in waits}
    for at, before in waits.items():
        for one in before:
            readers[one].append(at)
    runs = [at for at, before in waits.items() if not before]
    for at in runs:
        for reader in readers[at]:
            waits[reader].discard(at)
            if not waits[reader]:
                runs.append(reader)
    return sorted(waits.keys() - set(runs))


def _at_queues(items: Sequence[Step], needed: Sequence[set[str]], op: str) -> Iterator[tuple[bytes, tuple[int, str]]]:
    """Yields the ops that enqueue or dequeue: the name of the queue, and the node."""
    for worker, step in enumerate(items):
        for node in step.graph_index.of_op(op):
            if node.name in needed[worker]:
                yield step.graph_index.nodes[node_of(node.input[0])].attr["shared_name"].s, (worker, node.name)


def test_workers_that_wait_for_each_other_are_seen():
    """The check above detects a deadlock: two workers that first dequeue the element that the other enqueues later."""
    model = Drawn((frozenset({0}), frozenset({1})), (0, 1), frozenset())
    captured = capture(model.made(), *batch(2), is_global=True)
    items = dealt_out(captured, Laid(2, (0, 1), 2, 1, "GPipe").strategy(captured))
    assert left_waiting(items) == []
    first, last = items
    graph = tf.compat.v1.GraphDef()
    graph.CopyFrom(first.graph_def)
    takes = {n.name for n in first.graph_index.of_op("QueueDequeueV2")}
    for node in graph.node:
        if node.op == "QueueEnqueueV2":
            node.input.extend(f"^{name}" for name in sorted(takes))
    stuck = left_waiting([first.with_graph(graph), last])
    assert {worker for worker, _ in stuck} == {0, 1}
