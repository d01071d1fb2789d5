"""Small models in float64 whose variables' names contain one of four parts ("part_2_kernel")."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from autodist.graph.pipeline_schedule import SCHEDULES
from autodist.graph.step import Step
from autodist.kernels import KERNELS
from autodist.kernels.finish.call_units import CallUnits
from autodist.proto import strategy_pb2
from tests.unit.kernels.in_one_process import CapturedFunction, Trained, capture, plan, train

WORDS = 11

IN_COPIES = tuple(kernel for kernel in KERNELS if not isinstance(kernel, CallUnits))
"""All kernels except CallUnits, so that each micro-batch of a stage keeps its own copy of the nodes."""

StepFunction = Callable[..., object]
Apply = Callable[[Sequence[tf.Variable], Sequence[tf.Tensor]], None]


WIDTH = 6
"""Of the layers of `divisible`."""


class Parts:
    """Makes variables, and applies gradients."""

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        self.optimizer, self.variables, self._draw = optimizer, [], np.random.default_rng(5)

    def weight(self, part: int, name: str, *shape: int) -> keras.Variable:
        value = self._draw.normal(size=shape) * 0.5
        self.variables.append(keras.Variable(value, name=f"part_{part}_{name}", dtype="float64"))
        return self.variables[-1]

    def step(self, loss_of: Callable[..., tf.Tensor]) -> StepFunction:
        self.optimizer.build(self.variables)

        def step(*batch):
            with tf.GradientTape() as tape:
                loss = loss_of(*batch)
            gradients = tape.gradient(loss, [v.value for v in self.variables])
            self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))
            return loss

        return step


def mlp(parts: Parts) -> StepFunction:
    """Four layers."""
    layers = [(parts.weight(k, "kernel", 5, 5), parts.weight(k, "bias", 5)) for k in range(4)]

    def loss(x, y):
        for kernel, bias in layers:
            x = tf.tanh(x @ kernel.value + bias.value)
        return tf.reduce_mean(tf.square(x - y))

    return parts.step(loss)


def divisible(parts: Parts, act: Callable[[tf.Tensor], tf.Tensor] = tf.tanh) -> StepFunction:
    """Four layers that two workers can divide."""
    layers = [(parts.weight(k, "kernel", WIDTH, WIDTH), parts.weight(k, "bias", WIDTH)) for k in range(4)]

    def loss(x, y):
        for kernel, bias in layers:
            x = act(x @ kernel.value + bias.value)
        return tf.reduce_mean(tf.square(x - y))

    return parts.step(loss)


def skip(parts: Parts) -> StepFunction:
    """Returns a step in which the last part reads a tensor of the first, and all parts read the input."""
    kernels = [parts.weight(k, "kernel", 5, 5) for k in range(4)]

    def loss(x, y):
        first = h = tf.tanh(x @ kernels[0].value)
        for kernel in kernels[1:3]:
            h = tf.nn.relu(h @ kernel.value + x)
        return tf.reduce_mean(tf.square((h + first) @ kernels[3].value - y)) + 0.1 * tf.nn.l2_loss(kernels[1].value)

    return parts.step(loss)


def tied(parts: Parts) -> StepFunction:
    """The last part computes logits with the first part's table."""
    table = parts.weight(0, "table", WORDS, 5)
    kernels = [parts.weight(k, "kernel", 5, 5) for k in range(1, 4)]

    def loss(words, following):
        h = tf.gather(table.value, words)
        for kernel in kernels:
            h = tf.tanh(h @ kernel.value)
        logits = tf.matmul(h, table.value, transpose_b=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=following, logits=logits)
        return tf.reduce_mean(losses)

    return parts.step(loss)


def dropout(parts: Parts) -> StepFunction:
    """Each part draws from a generator whose state every worker holds."""
    layers = [keras.layers.Dropout(0.4, seed=k, dtype="float64") for k in range(4)]
    kernels = [parts.weight(k, "kernel", 5, 5) for k in range(4)]

    def loss(x, y):
        for layer, kernel in zip(layers, kernels, strict=True):
            x = tf.tanh(layer(x, training=True) @ kernel.value)
        return tf.reduce_mean(tf.square(x - y))

    return parts.step(loss)


def recurrent(parts: Parts) -> StepFunction:
    """Loops of the later parts read lists computed from the first part's output, and from the batch."""
    first = parts.weight(0, "kernel", 5, 5)
    kernels = [parts.weight(k, "kernel", 5, 5) for k in range(1, 4)]

    def loss(x, y):
        sequence = tf.stack([tf.tanh(x @ first.value), tf.reverse(x, [1])], 1)
        for kernel in kernels:

            def cell(state, entry, kernel=kernel):
                return tf.tanh(state + entry @ kernel.value)

            steps = tf.scan(cell, tf.transpose(sequence, [1, 0, 2]), tf.zeros_like(x))
            sequence = tf.transpose(steps, [1, 0, 2])
        return tf.reduce_mean(tf.square(sequence[:, -1] - y))

    return parts.step(loss)


def normalised(parts: Parts) -> StepFunction:
    """Kernels are normalised and written before their use, with a state that all workers hold."""
    kernels = [parts.weight(k, "kernel", 5, 5) for k in range(4)]
    state = tf.Variable(np.linspace(1.0, 2.0, 5)[:, None], name="direction")

    def loss(x, y):
        for kernel in kernels:
            is_zero = tf.reduce_all(kernel.value == 0.0)
            product = functools.partial(lambda kernel: tf.math.l2_normalize(kernel.value @ state), kernel)
            state.assign(tf.cond(is_zero, lambda: state + 0.0, product))
            kernel.assign(kernel.value / tf.norm(state + 1.0))
            x = tf.tanh(x @ kernel.value)
        return tf.reduce_mean(tf.square(x - y))

    return parts.step(loss)


def running(parts: Parts) -> StepFunction:
    """Each part reads a state that all workers hold, after the earlier parts' writes for the same micro-batch."""
    kernels = [parts.weight(k, "kernel", 5, 5) for k in range(4)]
    state = tf.Variable(np.linspace(1.0, 2.0, 5), name="mean")

    def loss(x, y):
        for kernel in kernels:
            x = tf.tanh(x @ kernel.value) * state
            state.assign(0.5 * state + 0.5 * tf.reduce_mean(x, 0))
        return tf.reduce_mean(tf.square(x - y))

    return parts.step(loss)


def draws(parts: Parts) -> StepFunction:
    """Each part draws by operations that advance a state of their own."""
    kernels = [parts.weight(k, "kernel", 5, 5) for k in range(4)]

    def loss(x, y):
        for k, kernel in enumerate(kernels):
            x = tf.tanh(tf.nn.dropout(x @ kernel.value, 0.4, seed=k))
        return tf.reduce_mean(tf.square(x - y))

    return parts.step(loss)


def norms(parts: Parts) -> StepFunction:
    """Batch normalisation in each part, whose averages every worker holds."""
    kernels = [parts.weight(k, "kernel", 5, 5) for k in range(4)]
    layers = [keras.layers.BatchNormalization(name=f"part_{k}_norm", dtype="float64") for k in range(4)]
    for layer in layers:
        layer.build((None, 5))
        parts.variables += [layer.gamma, layer.beta]

    def loss(x, y):
        for kernel, layer in zip(kernels, layers, strict=True):
            x = tf.tanh(layer(x @ kernel.value, training=True))
        return tf.reduce_mean(tf.square(x - y))

    return parts.step(loss)


MODELS = {
    "mlp": mlp, "skip": skip, "tied": tied, "dropout": dropout, "recurrent": recurrent, "normalised": normalised,
    "running": running, "draws": draws, "norms": norms, "divisible": divisible,
}  # fmt: skip
SEEN_APART = {"dropout", "running", "draws", "norms"}
"""Models in which a micro-batch sees only its own examples, or draws for them."""


def batches(model: str, counts: Sequence[int], seed: int = 0) -> list[list[np.ndarray]]:
    draw = np.random.default_rng(seed)
    if model == "tied":
        return [[draw.integers(0, WORDS, count) for _ in range(2)] for count in counts]
    width = WIDTH if model == "divisible" else 5
    return [[draw.normal(size=(count, width)) for _ in range(2)] for count in counts]


OPTIMIZERS: Mapping[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9),
    "adam": functools.partial(keras.optimizers.Adam, 0.01),
    "norm": functools.partial(keras.optimizers.Adam, 0.01, global_clipnorm=0.3),
}


def made(model: str, optimizer: str = "adam") -> StepFunction:
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        return MODELS[model](Parts(OPTIMIZERS[optimizer]()))
    finally:
        keras.config.set_floatx(before)


def of_two_kernels(kernels: Sequence[tf.Variable]) -> Callable[[tf.Tensor], tf.Tensor]:
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(tf.tanh(x @ kernels[0]) @ kernels[1]))
        for kernel, gradient in zip(kernels, tape.gradient(loss, kernels), strict=True):
            kernel.assign_sub(gradient)
        return loss

    return step


def stage_of(captured: CapturedFunction, stages: int) -> dict[str, int]:
    """Returns the pipeline stage of each trained variable, with the four parts evenly distributed."""
    names = dict.fromkeys(g.variable for g in captured.step.gradients)
    return {name: int(name.removeprefix("part_")[0]) * stages // 4 for name in names}


def pipelined(
    step: Step,
    stage_of: Mapping[str, int],
    stages: int,
    micro_batches: int,
    schedule: str = "GPipe",
    pipelines: int = 1,
    recompute: bool = False,
) -> strategy_pb2.Strategy:
    """A strategy that assigns variables to pipeline stages; stage s has the workers from s * pipelines on.

    Each pipeline has the same number of micro-batches.
    """
    owners = {name: stage * pipelines for name, stage in stage_of.items()}
    servers = stages * pipelines - 1
    strategy = plan(step, 1, micro_batches * pipelines, owners=owners, servers=servers, one_machine=True)
    strategy.pipeline.schedule = SCHEDULES.index(schedule)
    strategy.pipeline.recompute = recompute
    for first in range(0, stages * pipelines, pipelines):
        stage_group = [strategy_pb2.PipelineStage(worker=first + k, device="cpu:0") for k in range(1, pipelines)]
        strategy.pipeline.stages.add(worker=first, device="cpu:0", stage_group=stage_group)
    return strategy


def on_mesh(
    step: Step,
    stage_of: Mapping[str, int],
    sizes: Mapping[str, int],
    layouts: Mapping[str, str],
    micro_batches: int = 2,
    schedule: str = "1F1B",
    recompute: bool = False,
) -> strategy_pb2.Strategy:
    """A strategy for a mesh with the axes stage, data and model; `layouts` are the texts of variables' shardings."""
    strategy = pipelined(step, stage_of, sizes["stage"], micro_batches, schedule, sizes["data"], recompute=recompute)
    count = sizes["stage"] * sizes["data"] * sizes["model"]
    strategy.graph_config.workers = count
    strategy.mesh.CopyFrom(
        strategy_pb2.Mesh(
            axes=[strategy_pb2.MeshAxis(name=name, size=size) for name, size in sizes.items()],
            data="data",
            places=[strategy_pb2.Replica(worker=worker, device="cpu:0") for worker in range(count)],
            variables=[
                strategy_pb2.VariableSharding(variable=name, sharding=text, origin="a test")
                for name, text in layouts.items()
            ],
        )
    )
    return strategy


def trained(
    step: StepFunction,
    given: Sequence[Sequence[np.ndarray]],
    stages: int,
    micro_batches: int,
    schedule: str,
    pipelines: int = 1,
) -> tuple[Trained, Trained, CapturedFunction]:
    """As pipelines, and as as many replicas on one worker."""
    captured = capture(step, *given[0], is_global=True)
    strategy = pipelined(captured.step, stage_of(captured, stages), stages, micro_batches, schedule, pipelines)
    alone = plan(captured.step, 1, micro_batches * pipelines)
    return train(captured, strategy, given), train(captured, alone, given), captured
