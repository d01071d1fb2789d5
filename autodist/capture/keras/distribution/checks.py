"""Honours `DataParallel` of `keras.distribution`, and rejects distributions that shard the variables of a model."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import keras
import tensorflow as tf
from keras.src.distribution.distribution_lib import Distribution  # the base class, which Keras does not export

from autodist.capture.keras.distribution.layouts import describe_missing, layouts_of
from autodist.capture.keras.distribution.meshes import describe_mesh
from autodist.capture.keras.distribution.run_settings import current_run
from autodist.capture.keras.distribution.variables import REMOVE, KerasVariable, made_under
from autodist.capture.training_hooks import is_distributing
from autodist.errors import StrategyError
from autodist.logs.formatting import counted
from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.tf_compat.patches import SET_DISTRIBUTIONS, patched

log = logging.getLogger("autodist")

_SHARDING = (keras.distribution.ModelParallel, keras.distribution.LayoutMap)
"""The classes whose layouts are translated; a subclass may follow other rules."""

_is_in_scope: ContextVar[bool] = ContextVar("is_in_scope", default=False)


def is_distribution(value: Any) -> bool:
    """Returns True for a distribution of Keras, or a LayoutMap."""
    return isinstance(value, Distribution | keras.distribution.LayoutMap)


def check_distribution(distribution: Any, variables: Collection[Any] = (), slots: Iterable[Any] = ()) -> None:
    """Accepts None and `DataParallel`, which trains as AutoDist does, with the replicas in place of its devices.

    Args:
        distribution: a distribution of Keras, or a LayoutMap.
        variables: the Keras variables that it would shard, if they are known.
        slots: the variables of the optimizer.

    Raises:
        StrategyError: the distribution is another one: `ModelParallel`, or a class of the script. The message names the
            first fault of its mesh and its layouts, if they have any.
    """
    if distribution is None:
        return
    if type(distribution) is keras.distribution.DataParallel:
        _require_whole_batches(distribution)
        _note_data_parallel(distribution.device_mesh.devices.size)
        return
    name = f"keras.distribution's {type(distribution).__name__}"
    if type(distribution) in _SHARDING:
        with _noting_support(name):
            _require_one_strategy(name, distribution)
            described = [KerasVariable.of(variable) for variable in variables]
            layouts = layouts_of(distribution, current_run(), described, [slot.path for slot in slots])
            _require_made_under(distribution, variables)
        for message in describe_missing(layouts, described):
            log.warning("%s", message, extra=ALIKE_EVERYWHERE)
    raise StrategyError(
        f"{name} is set, and AutoDist does not support it yet: Keras ignores it on TensorFlow, so every replica would "
        f"hold and compute the whole model. {REMOVE}; `strategy: PartitionedPS` or ShardedAllReduce in the YAML keeps "
        "variables in shards, and Pipeline divides the model."
    )


def has_distribution() -> bool:
    """Returns True if a distribution is set; a quick check for each step."""
    return keras.distribution.distribution() is not None


def check_current_distribution(variables: Collection[Any] = (), slots: Iterable[Any] = ()) -> None:
    """Checks the current distribution, as `check_distribution` does."""
    check_distribution(keras.distribution.distribution(), variables, slots)


def check_model(model: Any) -> None:
    """Checks the current distribution with the variables of a Keras model.

    Raises:
        StrategyError: as for `check_distribution`.
    """
    if not has_distribution():
        return
    if not isinstance(model, keras.Model):  # of tf_keras, which has no distributions
        check_current_distribution()
        return
    optimizer = getattr(model, "optimizer", None)
    check_current_distribution(model.weights, () if optimizer is None else optimizer.variables)


@contextmanager
def checking_distributions() -> Iterator[None]:
    """Checks the current distribution at entry, and each one that is set while the context is open.

    Raises:
        StrategyError: a distribution is neither None nor `DataParallel`.
    """
    check_current_distribution()

    def set_distribution(plain: Any, value: Any) -> None:
        check_distribution(value)
        plain(value)

    token = _is_in_scope.set(True)
    try:
        with patched(dict.fromkeys(SET_DISTRIBUTIONS, set_distribution)):
            yield
    finally:
        _is_in_scope.reset(token)
    check_current_distribution()  # the script may have called a name that it imported earlier


def is_in_distributed_graph() -> bool:
    """Returns True while a distributed step is captured, or built in the scope as a graph of TensorFlow 1."""
    if is_distributing():
        return True
    return _is_in_scope.get() and not tf.executing_eagerly() and not tf.inside_function()


def _require_made_under(distribution: Any, variables: Iterable[Any]) -> None:
    for variable in variables:
        if made_under(variable._value) is not distribution:
            raise StrategyError(
                f"The variable {variable.path} was made before keras.distribution's {type(distribution).__name__} was "
                f"set: {describe_mesh(distribution.device_mesh)}. Set the distribution before the model is built, so "
                "that each variable is made with its layout."
            )


def _require_one_strategy(name: str, distribution: Any) -> None:
    run = current_run()
    if run is not None and run.strategy is not None:
        raise StrategyError(
            f"{name} is set, {describe_mesh(distribution.device_mesh)}, and {run.strategy} chooses another strategy. "
            "Remove one of the two."
        )


def _require_whole_batches(distribution: Any) -> None:
    run = current_run()
    if distribution.auto_shard_dataset or run is None or run.workers == 1 or run.batch == "per_worker":
        return
    raise StrategyError(
        "keras.distribution's DataParallel is made with auto_shard_dataset=False: each process passes its own part of "
        f"the data. AutoDist takes the batches of `fit` as whole batches ({run.machines}) and gives each worker its "
        "part. Set `batch: per_worker` in the YAML, or leave auto_shard_dataset out and pass the whole data."
    )


@contextmanager
def _noting_support(name: str) -> Iterator[None]:
    """Notes in an error about a distribution that a distribution without faults is refused, too."""
    try:
        yield
    except StrategyError as error:
        error.add_note(f"{name} is not supported yet, also without this fault.")
        raise


@functools.cache
def _note_data_parallel(devices: int) -> None:
    log.info(
        "AutoDist trains as keras.distribution.DataParallel does: each batch is divided among the replicas that the "
        "YAML names, instead of the %s of Keras's mesh.", counted(devices, "device"), extra=ALIKE_EVERYWHERE,
    )  # fmt: skip
