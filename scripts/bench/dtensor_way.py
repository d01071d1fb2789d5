"""Trains layers of a dense network with TensorFlow's DTensor, the peer of a mesh.

Keras's `fit` and its optimizers do not run under DTensor, so the variables, their layouts and the update are written by
hand: the matrices are divided by columns and by rows in turn, and SGD updates each variable alone.
"""

from __future__ import annotations

import os

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from bench.models import Task

DATA, MODEL = "data", "model"
SIZES = {DATA: 2, MODEL: 2}
SMALLEST = 16
"""The number of columns from which a matrix is divided."""


def join(workers: int, index: int, addresses: list[str]) -> None:
    """Makes this process a client of several; with one client, DTensor needs no setup."""
    if workers > 1:
        os.environ["DTENSOR_JOBS"] = ",".join(addresses)
        os.environ["DTENSOR_NUM_CLIENTS"] = str(workers)
        os.environ["DTENSOR_CLIENT_ID"] = str(index)
        os.environ["DTENSOR_JOB_NAME"] = "worker"
    cpu = tf.config.list_physical_devices("CPU")[0]
    here = SIZES[DATA] * SIZES[MODEL] // workers
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * here)
    dtensor.initialize_accelerator_system("CPU")


class Dense:
    """The dense layers of a model, and their step with SGD."""

    def __init__(self, task: Task) -> None:
        self._mesh = dtensor.create_distributed_mesh(list(SIZES.items()), device_type="CPU")
        self._batch, self._rate = task.batch, float(task.optimizer().learning_rate)
        values = [np.asarray(weight) for weight in task.make_model().get_weights()]
        self._layers = [
            (self._variable(kernel, k, 2), self._variable(bias, k, 1))
            for k, (kernel, bias) in enumerate(zip(values[::2], values[1::2], strict=True))
        ]
        self._step = tf.function(self._compute)

    def _variable(self, value: np.ndarray, layer: int, rank: int) -> dtensor.DVariable:
        """Divides kernels and biases of even layers by columns, kernels of odd layers by rows."""
        axes = [dtensor.UNSHARDED] * rank
        if layer % 2:
            axes[0] = MODEL if rank > 1 else dtensor.UNSHARDED
        elif value.shape[-1] >= SMALLEST:
            axes[-1] = MODEL
        layout = dtensor.Layout(axes, self._mesh)
        whole = dtensor.copy_to_mesh(tf.constant(value), dtensor.Layout.replicated(self._mesh, rank))
        return dtensor.DVariable(dtensor.relayout(whole, layout))

    def _compute(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        variables = [variable for layer in self._layers for variable in layer]
        with tf.GradientTape() as tape:
            for k, (kernel, bias) in enumerate(self._layers):
                x = x @ kernel + bias
                if k + 1 < len(self._layers):
                    x = tf.nn.relu(x)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=x)
            loss = tf.reduce_sum(losses) / self._batch
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(self._rate * gradient)
        return loss

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        """Trains on a global batch; returns the loss."""
        return float(self._step(self._packed(x), self._packed(y)).numpy())

    def _packed(self, whole: np.ndarray) -> tf.Tensor:
        layout = dtensor.Layout.batch_sharded(self._mesh, DATA, rank=whole.ndim)
        parts = np.split(whole, SIZES[DATA])
        places = [location[DATA] for location in self._mesh.local_device_locations()]
        return dtensor.pack([tf.constant(parts[place]) for place in places], layout)
