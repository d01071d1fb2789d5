"""Creates optimizer slots and metric variables before a model's first step, which is then traced only once."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from autodist.capture.local_steps import plain_variable
from autodist.tf_compat.patches import definer_of

BEFORE_STEP = "_autodist_before_step"
"""Attribute of a model: a callback for its next training step, called before it when metrics have their variables."""

_PLAIN_STEP = keras.Model.train_step


def make_state(model: keras.Model, data: Any) -> None:
    """Creates the slots of the optimizer and the variables of the metrics, as the first step would.

    The variables of the script's own `train_step`, and the outputs of a subclassed model, are not known in advance. The
    step creates the rest while it is traced, and TensorFlow then traces it again.

    Args:
        model: compiled, before its first step.
        data: one batch, as `train_step` takes it.

    Raises:
        ValueError: the metrics do not fit the model's outputs; Keras would raise this error in the step, too.
    """
    if type(model).train_step is not _PLAIN_STEP or not model.built:
        return
    build_optimizer(model)
    metrics = model._compile_metrics
    _, labels, _ = keras.utils.unpack_x_y_sample_weight(data)
    outputs = _outputs(model)
    if metrics is not None and not metrics.built and outputs is not None and _are_arrays(labels):
        metrics.build(labels, outputs)


def build_optimizer(model: keras.Model) -> None:
    """Creates the slots of a model's optimizer, under the names of its first step."""
    optimizer = model.optimizer
    if optimizer is not None and not optimizer.built and model.trainable_variables:
        with keras.name_scope(optimizer.name, caller=optimizer):  # as in `apply`
            optimizer.build(model.trainable_variables)


def has_known_outputs(model: keras.Model) -> bool:
    """Returns True if a model's outputs are known before it is called."""
    return _outputs(model) is not None


def is_about_to_step(model: keras.Model) -> None:
    """Calls the callback `BEFORE_STEP` of a model, if it has one; runs before each training step."""
    waiting = vars(model).pop(BEFORE_STEP, None)
    if waiting is not None:
        waiting()


def reset_variables(model: Any) -> list[tf.Variable]:
    """Returns the variables of those metrics that Keras's own code resets at the start of an epoch or evaluation."""
    if not _is_keras(model, "reset_metrics"):
        return []
    metrics = [one for metric in model.metrics for one in getattr(metric, "metrics", [metric])]
    return [plain_variable(v) for metric in metrics if _is_keras(metric, "reset_state") for v in metric.variables]


def _is_keras(instance: Any, method: str) -> bool:
    package = definer_of(type(instance), method).__module__.partition(".")[0]
    return package in ("keras", "tf_keras") and method not in vars(instance)


def _outputs(model: keras.Model) -> Any:
    """Returns the symbolic outputs of a model of layers; None if they are known only in a call."""
    layers = model._functional if isinstance(model, keras.Sequential) else model
    return getattr(layers, "_outputs_struct", None)


def _are_arrays(labels: Any) -> bool:
    return labels is not None and all(hasattr(x, "shape") and hasattr(x, "dtype") for x in tf.nest.flatten(labels))
