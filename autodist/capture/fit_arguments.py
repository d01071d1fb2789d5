"""Arguments of `fit` in which all workers have to agree, and those of evaluations that workers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from autodist.errors import ClusterError

_ALWAYS = {"epochs": 1, "steps_per_epoch": None}
"""Arguments that decide how many steps there are, with Keras's defaults."""

_GLOBAL = {"batch_size": None, "validation_split": 0.0, "validation_freq": 1, "shuffle": True, "class_weight": None}
"""Arguments that decide which examples a step has, where every worker passes the same data."""

_SIZE = "the number of examples or batches in x"


def told_arguments(arguments: Mapping[str, Any], is_global: bool) -> dict[str, str]:
    """The arguments of a call of `fit`, by name, as texts that workers compare.

    Args:
        arguments: those that are passed, by name.
        is_global: whether every worker passes the same data.
    """
    found = {name: arguments.get(name, default) for name, default in _ALWAYS.items()}
    if is_global:
        found |= {name: arguments.get(name, default) for name, default in _GLOBAL.items()}
        found[_SIZE] = _size_of(arguments.get("x"))
    return {name: _told(value) for name, value in found.items()}


def told_lengths(arguments: Mapping[str, Any]) -> dict[str, str]:
    """The arguments of a call of `evaluate` or `predict` that decide how many batches follow the first, as texts."""
    return {"steps": _told(arguments.get("steps")), _SIZE: _told(_size_of(arguments.get("x")))}


def require_same_arguments(chief: Mapping[str, str], mine: Mapping[str, str]) -> None:
    """Passes if this worker calls `fit` as the chief does.

    Raises:
        ClusterError: an argument differs; with both values.
    """
    for name, value in mine.items():
        if chief[name] != value:
            raise ClusterError(
                f"fit is called with another value of {name} here than on the chief:\n"
                f"    chief:  {chief[name]}\n    here:   {value}\n"
                "All workers make the same steps on the same data: pass the same on every worker. With batch: "
                "per_worker in the YAML each passes data of its own."
            )


def _size_of(data: Any) -> int | None:
    """The length of what is passed, as far as it is known without reading it."""
    if isinstance(data, tf.data.Dataset):
        batches = int(data.cardinality())
        return batches if batches >= 0 else None
    if isinstance(data, keras.utils.PyDataset):
        return data.num_batches
    leaves = [leaf for leaf in tree.flatten(data) if leaf is not None]
    if not leaves or not all(isinstance(leaf, np.ndarray | tf.Tensor) and np.ndim(leaf) for leaf in leaves):
        return None
    return int(np.shape(leaves[0])[0])


def _told(value: Any) -> str:
    if isinstance(value, Mapping):
        return str({_told(key): _told(one) for key, one in sorted(value.items(), key=str)})
    return str(value.item() if isinstance(value, np.generic) else value)
