"""The two versions of Keras that a script may use: Keras 3 and Keras 2 (tf_keras)."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import keras


def legacy_keras() -> Any | None:
    """Returns the module tf_keras if the script has imported it, else None."""
    module = sys.modules.get("tf_keras")
    return module if hasattr(module, "Model") else None


def uses_legacy_keras() -> bool:
    """Returns True if `tf.keras` is tf_keras and is not imported yet; its first use imports it.

    Ray sets the variable also where tf_keras is not installed; the script then uses `keras`.
    """
    is_set = os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
    return is_set and legacy_keras() is None and importlib.util.find_spec("tf_keras") is not None


def is_legacy(model: Any) -> bool:
    """Returns True for a model of tf_keras."""
    legacy = legacy_keras()
    return legacy is not None and isinstance(model, legacy.Model)


def callbacks_of(model: Any) -> Any:
    """Returns the callbacks module of a model's Keras."""
    legacy = legacy_keras()
    return legacy.callbacks if legacy is not None and is_legacy(model) else keras.callbacks


def steps_per_execution(model: Any) -> int:
    """Returns the number of steps in one call of a model's train function."""
    steps = model.steps_per_execution
    return steps if isinstance(steps, int) else 1 if steps is None else int(steps.numpy())
