"""An owner writes a variable only after every worker has read it, with or without a gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tensorflow as tf

from autodist.capture.function import CapturedFunction
from autodist.graph.editor import GraphEditor
from autodist.graph.effects import Effects
from autodist.graph.step import Step
from tests.unit.kernels.in_one_process import assert_same, capture, one_device, plan, rewritten, train
from tests.unit.kernels.in_one_session import readers_of
from tests.unit.kernels.place.partition.shards import numbers

OWNERS = {"first": 1, "second": 0}


def added() -> tuple[CapturedFunction, Callable[..., object]]:
    """Both terms of a sum have one gradient."""
    first, second = (tf.Variable(numbers(k, 4, 2), name=name) for k, name in enumerate(OWNERS))

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(x @ (first + second)) - 1.0))
        for variable, gradient in zip((first, second), tape.gradient(loss, (first, second)), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    return capture(step, numbers(0, 6, 4)), step


def followed() -> tuple[CapturedFunction, Callable[..., object]]:
    """The second variable follows the first, and no gradient reaches it: a target network."""
    first, second = (tf.Variable(numbers(k, 4, 2), name=name) for k, name in enumerate(OWNERS))

    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(x @ first) - 1.0))
        first.assign_sub(0.1 * tape.gradient(loss, first))
        seen = tf.reduce_mean(x @ second)
        second.assign(0.8 * second + 0.2 * first)
        return loss, seen

    return capture(step, numbers(0, 6, 4)), step


STEPS = {"added": added, "followed": followed}


@pytest.mark.parametrize("name", STEPS)
def test_the_write_comes_after_all_reads(name: str):
    captured, _ = STEPS[name]()
    items = rewritten(captured, plan(captured.step, 2, 1, OWNERS))
    for variable in items[0].variables:
        owner = items[0].owners[variable.name]
        sent = _sent_after_reads(items[1 - owner], variable.handle, owner)
        arrived = _arrived_before_writes(items[owner], variable.handle)
        assert sent & arrived, f"worker {1 - owner} does not tell that it has read {variable.name}"


def _sent_after_reads(step: Step, handle: str, to: int) -> set[str]:
    """Returns the queues by which a worker signals another after a read of the variable."""
    editor, effects = GraphEditor(step.graph_def), Effects(step.graph_def)
    reads = {node.name for node in editor if handle in effects.of(node).reads}
    sends = [editor[name] for name, reader in readers_of(step).items() if reader == to]
    return {_queue(editor, node.input[0]) for node in sends if reads <= editor.ancestors([node.name])}


def _arrived_before_writes(step: Step, handle: str) -> set[str]:
    editor, effects = GraphEditor(step.graph_def), Effects(step.graph_def)
    (write,) = [node.name for node in editor if handle in effects.of(node).writes]
    before = editor.ancestors([write])
    return {_queue(editor, editor[name].input[0]) for name in before if editor[name].op == "QueueDequeueV2"}


def _queue(editor: GraphEditor, name: str) -> str:
    return editor[name].attr["shared_name"].s.decode()


@pytest.mark.parametrize("name", STEPS)
def test_training_equals_one_device(name: str):
    captured, step = STEPS[name]()
    batches = [(numbers(k, 6, 4),) for k in range(3)]
    found = train(captured, plan(captured.step, 2, 1, OWNERS), batches)
    assert_same(found, one_device(captured, step, batches))
