"""Common parts of the training programs: their registration, their split of batches, and their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

Array = NDArray[Any]

Results = dict[str, Array]
"""The results of a program, by name. Names that begin with `worker:` may differ between workers; all others must be the
same on each, bit for bit.
"""

STEPS, BATCH = 10, 30
"""30 examples do not divide by 4 replicas, so that replicas count differently."""


class Trainer(Protocol):
    """The part of `autodist.AutoDist` that programs use."""

    is_chief: bool
    worker_index: int
    num_workers: int
    num_replicas: int

    def scope(self) -> AbstractContextManager[Any]: ...

    def function(self, step: Callable[..., Any], *, jit_compile: bool | None = None) -> Callable[..., Any]: ...

    def create_distributed_session(self) -> tf.compat.v1.Session: ...

    def sampler(self, records: int, batch: int, seed: int) -> Iterable[Array]: ...

    def batch_slice(self, start: int, stop: int) -> slice: ...

    def distribute_dataset(self, dataset: Iterable[Any]) -> Iterable[Any]: ...


class Alone:
    """Replaces AutoDist in a program that trains on one device: every method becomes TensorFlow's own."""

    is_chief = True
    worker_index = 0
    num_workers = num_replicas = 1

    def scope(self) -> AbstractContextManager[None]:
        return nullcontext()

    def function(self, step: Callable[..., Any], *, jit_compile: bool | None = None) -> Callable[..., Any]:
        return tf.function(step, jit_compile=jit_compile)

    def create_distributed_session(self) -> tf.compat.v1.Session:
        return tf.compat.v1.Session()

    def sampler(self, records: int, batch: int, seed: int) -> Iterable[Array]:
        """The first epoch of it."""
        order = tf.random.experimental.index_shuffle(tf.range(records), (seed, 0), records - 1).numpy()
        return np.split(order, range(batch, records, batch))

    def batch_slice(self, start: int, stop: int) -> slice:
        return slice(start, stop)

    def distribute_dataset(self, dataset: Iterable[Any]) -> Iterable[Any]:
        return dataset


Program = Callable[[Trainer], Results]

PROGRAMS: dict[str, Program] = {}
"""All programs, by name."""


def program(function: Program) -> Program:
    """Registers a program under its function's name."""
    return register(function.__name__, function)


def register(name: str, function: Program) -> Program:
    assert name not in PROGRAMS, f"there are two programs named {name}"
    PROGRAMS[name] = function
    return function


def in_float32(train: Program, ad: Trainer) -> Results:
    """Returns the results of a program that trains entirely in float32."""
    keras.config.set_floatx("float32")
    try:
        return train(ad)
    finally:
        keras.config.set_floatx("float64")


def own(ad: Trainer, batch: Array) -> Array:
    """Returns this worker's part of a global batch, if the program feeds each worker its own."""
    return np.array_split(batch, ad.num_workers)[ad.worker_index]


def values_of(variables: Iterable[Any]) -> Results:
    """Every variable's value, under its position and name."""
    return {f"{k:03d} {getattr(v, 'path', v.name)}": np.asarray(v.numpy()) for k, v in enumerate(variables)}


def values_after_fit(model: keras.Model, history: keras.callbacks.History) -> Results:
    """Returns all variables changed by `fit`, and its metrics of each epoch."""
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    logs = {f"history {name}": np.array(values) for name, values in history.history.items()}
    return values_of(variables) | logs


def classes(rng: np.random.Generator, shape: int | Sequence[int]) -> Array:
    return rng.integers(0, 3, shape).astype("int32")
