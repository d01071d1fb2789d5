"""What Keras makes in a model's first step, made before it: a step that makes variables is traced twice."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

BEFORE_STEP = "_autodist_before_step"
"""Called, where a model has it, before the next step that trains it: once, when metrics have their variables."""

_PLAIN_STEP = keras.Model.train_step


def make_state(model: keras.Model, data: Any) -> None:
    """Makes the slots of the optimizer and the variables of the metrics, as the step would.

    What a step of the script's own makes is not known, and what a model returns that is no graph of layers is not
    either: these make the rest while they are traced, which TensorFlow does once more then.

    Args:
        model: compiled, and about to make its first step.
        data: one batch, as `train_step` takes it.

    Raises:
        ValueError: from Keras, as the step would: metrics do not fit the model's outputs.
    """
    if type(model).train_step is not _PLAIN_STEP or not model.built:
        return
    optimizer = model.optimizer
    if optimizer is not None and not optimizer.built and model.trainable_variables:
        with keras.name_scope(optimizer.name, caller=optimizer):  # in which `apply` calls it
            optimizer.build(model.trainable_variables)
    metrics = model._compile_metrics
    _, labels, _ = keras.utils.unpack_x_y_sample_weight(data)
    outputs = _outputs(model)
    if metrics is not None and not metrics.built and outputs is not None and _are_arrays(labels):
        metrics.build(labels, outputs)


def is_about_to_step(model: keras.Model) -> None:
    """Called before each step that trains a model."""
    waiting = vars(model).pop(BEFORE_STEP, None)
    if waiting is not None:
        waiting()


def _outputs(model: keras.Model) -> Any:
    """What a model of layers returns, as symbols; None: that is known when it is called."""
    layers = model._functional if isinstance(model, keras.Sequential) else model
    return getattr(layers, "_outputs_struct", None)


def _are_arrays(labels: Any) -> bool:
    return labels is not None and all(hasattr(x, "shape") and hasattr(x, "dtype") for x in tf.nest.flatten(labels))
