"""Keras on JAX: one process with one or several devices, or several processes that reduce by gloo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import keras
import numpy as np

from bench.models import Task
from bench.turns import Training, parts


def train(task: Task, index: int, addresses: Sequence[str]) -> Training:
    """Trains with a compiled step that is given its state, as JAX's guide for Keras shows.

    Args:
        task: the model and its data.
        index: the number of this process.
        addresses: of all processes; empty for a single one.
    """
    if addresses:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(addresses[0], len(addresses), index)
    devices = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))
    whole, divided = (
        jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec(*axes)) for axes in ((), ("batch",))
    )
    model, optimizer = task.make_model(), task.optimizer()
    optimizer.build(model.trainable_variables)

    def loss_of(trainable: Any, others: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
        logits, others = model.stateless_call(trainable, others, x, training=True)
        return task.loss(y, logits, task.batch), others

    def step_of(state: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
        trainable, others, slots = state
        (loss, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable, others, x, y)
        trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
        return loss, (trainable, others, slots)

    compiled = jax.jit(step_of, donate_argnums=0, out_shardings=(whole, whole))
    variables = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    # A copy: the variables of Keras keep theirs.
    state = [[_shared(np.array(v.value), whole) for v in group] for group in variables]
    batches = parts(task, index, max(1, len(addresses)))

    def step() -> float:
        nonlocal state
        x, y = (jax.make_array_from_process_local_data(divided, part) for part in next(batches))
        loss, state = compiled(state, x, y)
        return float(loss)

    return Training(step, index == 0)


def _shared(value: np.ndarray, whole: jax.sharding.NamedSharding) -> jax.Array:
    return jax.make_array_from_process_local_data(whole, value, value.shape)


assert keras.backend.backend() == "jax", "started by bench.jobs, which sets KERAS_BACKEND"
