"""Arguments of calls of `fit`, `evaluate` and `predict`: compares them between workers, and derives batch lengths."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from autodist.errors import ClusterError
from autodist.reading.data_sets import kind_of

_ALWAYS = {"epochs": 1, "steps_per_epoch": None}
"""Arguments that determine the number of steps, with Keras's defaults."""

_GLOBAL = {"batch_size": None, "validation_split": 0.0, "validation_freq": 1, "shuffle": True, "class_weight": None}
"""Arguments that determine the examples of a step if every worker passes the same data."""

_SIZE = "the number of examples or batches in x"


def comparable_arguments(arguments: Mapping[str, Any], is_global: bool) -> dict[str, str]:
    """Returns the arguments of a call of `fit`, by name, as texts that workers compare.

    Args:
        arguments: the arguments, by name.
        is_global: True if every worker passes the same data.
    """
    found = {name: arguments.get(name, default) for name, default in _ALWAYS.items()}
    if is_global:
        found |= {name: arguments.get(name, default) for name, default in _GLOBAL.items()}
        found[_SIZE] = _size_of(arguments.get("x"))
    return {name: _as_text(value) for name, value in found.items()}


def comparable_lengths(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Returns the arguments of `evaluate` or `predict` that determine the number of batches, as texts."""
    return {"steps": _as_text(arguments.get("steps")), _SIZE: _as_text(_size_of(arguments.get("x")))}


def require_same_arguments(chief: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Checks that this worker calls `fit` with the chief's arguments.

    Raises:
        ClusterError: an argument differs; the message has both values.
    """
    for name, value in own.items():
        if chief[name] != value:
            raise ClusterError(
                f"fit is called with another value of {name} here than on the chief:\n"
                f"    chief:  {chief[name]}\n    here:   {value}\n"
                "All workers run the same steps on the same data: pass the same value on every worker. With batch: "
                "per_worker in the YAML each worker passes its own data."
            )


def _size_of(data: Any) -> int | None:
    """Returns the length of the data if it is known without reading it."""
    if isinstance(data, tf.data.Dataset):
        batches = int(data.cardinality())
        return batches if batches >= 0 else None
    if isinstance(data, keras.utils.PyDataset):
        return data.num_batches
    return _examples_of(data)


def _as_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return str({_as_text(key): _as_text(one) for key, one in sorted(value.items(), key=str)})
    return str(value.item() if isinstance(value, np.generic) else value)


_LENGTHS = "_autodist_batch_lengths"
"""Attribute of a model in `fit`: the lengths of its batches."""

_DEFAULT_BATCH = 32

_KEEPS_BATCHES = ("Prefetch", "Map", "ParallelMap", "Options", "Cache", "Shuffle", "Repeat")
_MAKES_BATCHES = ("Batch", "ParallelBatch")


def recording_lengths(fit: Callable[..., Any], model: keras.Model) -> Callable[..., Any]:
    """Wraps a model's `fit` so that `lengths_to_come` returns the lengths of its batches during the call."""

    def call(bound: inspect.BoundArguments) -> Any:
        vars(model)[_LENGTHS] = batch_lengths(arguments_of(bound))
        try:
            return fit(*bound.args, **bound.kwargs)
        finally:
            vars(model).pop(_LENGTHS, None)

    return with_bound_arguments(fit, call)


def lengths_to_come(model: keras.Model) -> tuple[int, ...]:
    """Returns the lengths of the batches of a model's `fit`; empty outside of `fit` or if they are unknown."""
    return vars(model).get(_LENGTHS, ())


def batch_lengths(arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the distinct lengths of an epoch's batches, if they are known without reading any."""
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
    """Returns the number of examples in arrays; None for other data, such as a generator."""
    leaves = [leaf for leaf in tree.flatten(data) if leaf is not None]
    if not leaves or not all(isinstance(leaf, np.ndarray | tf.Tensor) and np.ndim(leaf) for leaf in leaves):
        return None
    return int(np.shape(leaves[0])[0])


def _of_data_set(data: tf.data.Dataset) -> tuple[int, ...]:
    found: Any = data
    while kind_of(found) in _KEEPS_BATCHES:
        found = getattr(found, "_input_dataset", None)
    if kind_of(found) not in _MAKES_BATCHES:
        return ()
    batch, examples = int(found._batch_size), int(found._input_dataset.cardinality())
    if examples < 0 or bool(found._drop_remainder):  # unknown, or without end
        return (batch,)
    return _lengths(examples, batch)


def _lengths(examples: int, batch: int) -> tuple[int, ...]:
    whole, rest = divmod(examples, batch)
    return (*([batch] if whole else []), *([rest] if rest else []))


def with_bound_arguments(
    method: Callable[..., Any], call: Callable[[inspect.BoundArguments], Any]
) -> Callable[..., Any]:
    """Wraps a method so that `call` gets the bound arguments of each call.

    If the arguments do not fit the signature, the method is called and raises its own TypeError.
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return method(*args, **kwargs)
        return call(bound)

    return called


def replacing_data(method: Callable[..., Any], replacement: Callable[[Any, bool], Any]) -> Callable[..., Any]:
    """Wraps `fit`, `evaluate` or `predict`: Keras reads the replacement of the data that the script passes.

    Args:
        method: the method.
        replacement: called with the data, and True if the model trains on them.
    """

    def call(bound: inspect.BoundArguments) -> Any:
        for name in ("x", "validation_data"):
            given = argument(bound, name)
            if (replaced := replacement(given, name == "x" and method.__name__ == "fit")) is not given:
                set_argument(bound, name, replaced)
        return method(*bound.args, **bound.kwargs)

    return with_bound_arguments(method, call)


def arguments_of(bound: inspect.BoundArguments) -> Mapping[str, Any]:
    """Returns all arguments of a call by name, those in `**kwargs` included."""
    return {**bound.arguments, **bound.arguments.get(_rest(bound.signature) or "", {})}


def takes(signature: inspect.Signature, name: str) -> bool:
    """Returns True if an argument of this name can be passed."""
    return name in signature.parameters or _rest(signature) is not None


def argument(bound: inspect.BoundArguments, name: str) -> Any:
    """Returns the value of an argument, including one in `**kwargs`; None if it is not passed."""
    return arguments_of(bound).get(name)


def set_argument(bound: inspect.BoundArguments, name: str, value: Any) -> None:
    """Sets the value of an argument."""
    if name in bound.signature.parameters:
        bound.arguments[name] = value
    else:
        bound.arguments.setdefault(str(_rest(bound.signature)), {})[name] = value


def _rest(signature: inspect.Signature) -> str | None:
    """Returns the name of the `**kwargs` parameter, if there is one."""
    return next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
