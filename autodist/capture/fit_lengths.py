"""Of which lengths the batches will be that `fit` makes, as far as its data tell it before the first one."""

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
