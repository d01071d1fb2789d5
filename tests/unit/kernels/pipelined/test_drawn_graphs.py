"""Drawn models: whatever reads what, over stages of a pipeline, a step ends, or it is refused before it begins."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autodist.errors import StrategyError
from autodist.graph.schedule import SCHEDULES
from tests.unit.kernels.in_one_process import assert_same, capture, one_device, train
from tests.unit.kernels.pipelined.models import pipelined

WIDTH = 3


@st.composite
def models(draw):
    """Layers, of each what it reads (an earlier layer's output, or the input, 0), its weight, and that weight's stage.

    Few weights are those of two layers.
    """
    stages = draw(st.integers(2, 4))
    layers = draw(st.integers(stages, 6))
    rising = draw(st.booleans())
    stage_of = [k * stages // layers for k in range(layers)] if rising else draw(
        st.lists(st.integers(0, stages - 1), min_size=layers, max_size=layers)
    )  # fmt: skip
    reads = [draw(st.sets(st.integers(0, k), min_size=1, max_size=2)) | ({k} if k else {0}) for k in range(layers)]
    weights = [draw(st.sampled_from(sorted({k, max(k - 2, 0)}))) for k in range(layers)]
    weights[: layers // 2] = range(layers // 2)
    returned = draw(st.sets(st.integers(1, layers), max_size=2))
    return stages, stage_of, reads, weights, returned


def made(stage_of, reads, weights, returned):
    kernels = {k: tf.Variable(np.random.default_rng(k).normal(size=(WIDTH, WIDTH)) / 2, name=f"v{k}") for k in weights}

    def step(x):
        with tf.GradientTape() as tape:
            outputs = [x]
            for read, weight in zip(reads, weights, strict=True):
                outputs.append(tf.tanh(tf.add_n([outputs[k] for k in sorted(read)]) @ kernels[weight]))
            loss = tf.reduce_mean(tf.square(outputs[-1])) + tf.add_n(
                [tf.reduce_mean(outputs[k]) for k in sorted(returned)] or [tf.constant(0.0, tf.float64)]
            )
        gradients = tape.gradient(loss, list(kernels.values()))
        for kernel, gradient in zip(kernels.values(), gradients, strict=True):
            if gradient is not None:
                kernel.assign_sub(0.1 * gradient)
        return [loss, *(outputs[k] for k in sorted(returned))]

    return step, {f"v{k}": stage_of[k] for k in kernels}


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(model=models(), micro_batches=st.integers(1, 3), schedule=st.sampled_from(SCHEDULES), rows=st.integers(1, 4))
def test_a_step_ends_as_on_one_device_or_is_refused(model, micro_batches, schedule, rows):
    stages, *rest = model
    step, stage_of = made(*rest)
    batches = [[np.random.default_rng(9).normal(size=(rows, WIDTH))]] * 2
    captured = capture(step, *batches[0], is_global=True)
    strategy = pipelined(captured, stage_of, stages, micro_batches, schedule)
    try:
        found = train(captured, strategy, batches)
    except StrategyError:
        assert rest[0] != sorted(rest[0]) or len(set(rest[2])) < len(rest[2]), "layers in their order are not refused"
        return
    assert_same(found, one_device(captured, step, batches), rtol=1e-9)
