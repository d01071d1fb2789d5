"""Arguments of `fit` in which all workers have to agree, and those of evaluations that workers share."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from autodist.capture.bound_calls import arguments_of, with_bound_arguments
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


_LENGTHS = "_autodist_batch_lengths"
"""Those of the `fit` that a model is in."""

_DEFAULT_BATCH = 32

_KEEPS_BATCHES = ("Prefetch", "Map", "ParallelMap", "Options", "Cache", "Shuffle", "Repeat")
_MAKES_BATCHES = ("Batch", "ParallelBatch")


def noting_lengths(fit: Callable[..., Any], model: keras.Model) -> Callable[..., Any]:
    """A model's `fit`, during which `lengths_to_come` gives the lengths of its batches."""

    def call(bound: inspect.BoundArguments) -> Any:
        vars(model)[_LENGTHS] = batch_lengths(arguments_of(bound))
        try:
            return fit(*bound.args, **bound.kwargs)
        finally:
            vars(model).pop(_LENGTHS, None)

    return with_bound_arguments(fit, call)


def lengths_to_come(model: keras.Model) -> tuple[int, ...]:
    """The lengths that batches of a model's `fit` will have; empty where it is in none, or it is not known."""
    return vars(model).get(_LENGTHS, ())


def batch_lengths(arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """The lengths of all batches of an epoch, as far as they are known without reading any.

    Args:
        arguments: of `fit`, by name.
    """
    data = arguments.get("x")
    if arguments.get("steps_per_epoch") is not None:
        return ()  # it may end before the last batch
    if isinstance(data, tf.data.Dataset):
        return _of_data_set(data)
    examples = _examples_of(data)
    if examples is None:
        return ()
    if arguments.get("validation_split") and arguments.get("validation_data") is None:
        examples = math.floor(examples * (1.0 - arguments["validation_split"]))
    return _lengths(examples, arguments.get("batch_size") or _DEFAULT_BATCH)


def _examples_of(data: Any) -> int | None:
    """How many examples arrays have; None of what is none, a generator say."""
    leaves = [leaf for leaf in tree.flatten(data) if leaf is not None]
    if not leaves or not all(isinstance(leaf, np.ndarray | tf.Tensor) and np.ndim(leaf) for leaf in leaves):
        return None
    return int(np.shape(leaves[0])[0])


def _of_data_set(data: tf.data.Dataset) -> tuple[int, ...]:
    found: Any = data
    while _kind_of(found) in _KEEPS_BATCHES:
        found = getattr(found, "_input_dataset", None)
    if _kind_of(found) not in _MAKES_BATCHES:
        return ()
    batch, examples = int(found._batch_size), int(found._input_dataset.cardinality())
    if examples < 0 or bool(found._drop_remainder):  # unknown, or without end
        return (batch,)
    return _lengths(examples, batch)


def _kind_of(data: Any) -> str:
    """What a data set does, as TensorFlow calls it: "Batch" for a `_BatchDataset`."""
    return type(data).__name__.removeprefix("_").removesuffix("Dataset")


def _lengths(examples: int, batch: int) -> tuple[int, ...]:
    whole, rest = divmod(examples, batch)
    return (*([batch] if whole else []), *([rest] if rest else []))
