"""Builds a model and its metrics before their values are restored: Keras builds some in the first step only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from autodist.capture.keras.model_state import build_optimizer, has_known_outputs
from autodist.errors import CheckpointError
from autodist.logs.formatting import words_of
from autodist.tf_compat.patches import EPOCH_DATA, patched

log = logging.getLogger("autodist")


@contextmanager
def building_models() -> Iterator[None]:
    """Context of a `fit` that restores values: the model is built when Keras has prepared the data.

    Raises:
        CheckpointError: the model cannot be built without a batch.
    """

    def build(plain: Callable[..., Any], model: keras.Model, iterator: Any = None, data_batch: Any = None) -> Any:
        if iterator is not None:
            batch = _spec_of(iterator)
            if not model.built:
                _build(model, batch)
            _build_metrics(model, batch)
        return plain(model, iterator, data_batch)

    with patched({EPOCH_DATA: build}):
        yield


def _spec_of(iterator: Any) -> Any:
    """Returns the specs of a batch of Keras's iterator."""
    batches = iterator._distributed_dataset
    if not hasattr(batches, "element_spec"):  # this worker's part
        batches = iterator.data_adapter.get_tf_dataset()
    return batches.element_spec


def _build(model: keras.Model, batch: Any) -> None:
    """Builds a model by a trace, as its first step would, so that variables have the same names."""
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    try:
        tf.function(lambda x: model(x, training=True), autograph=False).get_concrete_function(inputs)
    except Exception as error:
        raise CheckpointError(
            f"{model.name} is not built, so values cannot be restored, and it cannot be called without a batch "
            f"({type(error).__name__}: {words_of(error)}). Build it before `fit`, for example by a call on a batch."
        ) from error


def _build_metrics(model: keras.Model, batch: Any) -> None:
    """Builds the metrics of a subclassed model; those of others are built from its outputs before the first step."""
    metrics = model._compile_metrics
    if metrics is None or metrics.built or has_known_outputs(model):
        return
    build_optimizer(model)  # otherwise, Keras would do so under other names than in the first step
    try:
        model._symbolic_build(data_batch=batch)
    except Exception as error:  # noqa: BLE001 - whatever the model raises, it can train
        log.info(
            "the metrics of %s cannot be built before its first step (%s: %s).",
            model.name, type(error).__name__, words_of(error),
        )  # fmt: skip
