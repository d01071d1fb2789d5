"""Checks of the distribution of Keras that a script sets: it fits the run and its variables, or is rejected."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import keras
import tensorflow as tf
from keras.src.distribution.distribution_lib import Distribution  # the base class, which Keras does not export

from autodist.capture.keras.distribution.layouts import Layouts, describe_missing, layouts_of
from autodist.capture.keras.distribution.meshes import describe_mesh
from autodist.capture.keras.distribution.run_settings import RunSettings, current_run
from autodist.capture.keras.distribution.variables import REMOVE, KerasVariable, made_under
from autodist.capture.training_hooks import is_distributing
from autodist.errors import StrategyError
from autodist.logs.formatting import counted
from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.tf_compat.keras_versions import shards_dataset
from autodist.tf_compat.patches import SET_DISTRIBUTIONS, patched

log = logging.getLogger("autodist")

_accepted: WeakKeyDictionary[Any, RunSettings | None] = WeakKeyDictionary()
"""The run for which each distribution was accepted."""

_warned: WeakSet[Any] = WeakSet()
"""The distributions of whose keys a warning was logged."""

_is_in_scope: ContextVar[bool] = ContextVar("is_in_scope", default=False)


def is_distribution(value: Any) -> bool:
    """Returns True for a distribution of Keras, or a LayoutMap."""
    return isinstance(value, Distribution | keras.distribution.LayoutMap)


def check_distribution(distribution: Any, variables: Collection[Any] = (), slots: Iterable[Any] = ()) -> None:
    """Accepts None, `DataParallel`, and `ModelParallel` with the mesh of the run's strategy.

    `DataParallel` trains as AutoDist does, with the replicas in place of its devices.

    Args:
        distribution: a distribution of Keras.
        variables: the Keras variables that it shards, if they are known.
        slots: the variables of the optimizer.

    Raises:
        StrategyError: the distribution is a class of the script, or its mesh or its layouts have a fault.
    """
    run = current_run()
    if distribution is None or (run is not None and run.is_reference):
        return
    if type(distribution) is keras.distribution.DataParallel:
        _require_whole_batches(distribution)
        _note_data_parallel(distribution.device_mesh.devices.size)
        return
    if type(distribution) is not keras.distribution.ModelParallel:
        raise StrategyError(
            f"keras.distribution's {type(distribution).__name__} is set, and AutoDist does not support it: Keras "
            f"ignores it on TensorFlow, and a class of a script may follow any rules. {REMOVE} or ModelParallel."
        )
    if not variables and _accepted.get(distribution) is run:  # a check for each step
        return
    described = [KerasVariable.of(variable) for variable in variables]
    layouts = layouts_of(distribution, run, described, [slot.path for slot in slots])
    require_made_under(distribution, {variable.path: variable._value for variable in variables})
    _require_mesh_of_run(distribution, layouts, run)
    _accepted[distribution] = run
    if described:
        warn_of_layouts(distribution, layouts, described)


def as_distribution(value: Any) -> Any:
    """Returns the distribution that a value of `strategy` stands for: that of a LayoutMap is a `ModelParallel`.

    Raises:
        StrategyError: the LayoutMap has no mesh.
    """
    if not isinstance(value, keras.distribution.LayoutMap):
        return value
    layouts_of(value)
    return keras.distribution.ModelParallel(layout_map=value)


def sharding_distribution(chosen: Any) -> Any:
    """Returns the `ModelParallel` by which a run divides its variables, if any.

    Args:
        chosen: the argument `strategy` of `AutoDist(…)`, which comes before a distribution that the script has set.
    """
    one = keras.distribution.distribution() if chosen is None else chosen
    return one if type(one) is keras.distribution.ModelParallel else None


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
def setting_distribution(distribution: Any) -> Iterator[None]:
    """Sets a `ModelParallel` that the script passes as strategy; the context does nothing for other values.

    Raises:
        StrategyError: the script has set another one, too.
    """
    if type(distribution) is not keras.distribution.ModelParallel:
        yield
        return
    other = keras.distribution.distribution()
    if other is not None and other is not distribution:
        raise StrategyError(
            f"keras.distribution's {type(other).__name__} is set, {describe_mesh(other.device_mesh)}, and the argument "
            f"`strategy` of AutoDist(…) is another one, with {describe_mesh(distribution.device_mesh)}. Remove one."
        )
    with distribution.scope():
        yield


@contextmanager
def checking_distributions() -> Iterator[None]:
    """Checks the current distribution at entry, and each one that is set while the context is open.

    Raises:
        StrategyError: as for `check_distribution`.
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


def require_made_under(distribution: Any, variables: Mapping[str, Any]) -> None:
    """Checks that variables were made while a distribution was set.

    Args:
        distribution: a `ModelParallel`.
        variables: `tf.Variable`s of Keras, by path.

    Raises:
        StrategyError: one was made before.
    """
    for path, variable in variables.items():
        if made_under(variable) is not distribution:
            raise StrategyError(
                f"The variable {path} was made before keras.distribution's {type(distribution).__name__} was "
                f"set: {describe_mesh(distribution.device_mesh)}. Set the distribution before the model is built, so "
                "that each variable is made with its layout."
            )


def warn_of_layouts(distribution: Any, layouts: Layouts, variables: Iterable[KerasVariable]) -> None:
    """Warns, once for each distribution, of keys that match no variable or divide along the axis of the batch."""
    if distribution in _warned:
        return
    _warned.add(distribution)
    for message in describe_missing(layouts, variables):
        log.warning("%s", message, extra=ALIKE_EVERYWHERE)


def _require_mesh_of_run(distribution: Any, layouts: Layouts, run: RunSettings | None) -> None:
    """Checks that the strategy of the run has the mesh of a distribution. The chief does, since it has the strategy."""
    set_one = f"keras.distribution's ModelParallel is set, {describe_mesh(distribution.device_mesh)}"
    if layouts.mesh.places:
        raise StrategyError(
            f"{set_one}, and its mesh lists the places of the run in another order, {layouts.mesh.places}. Leave "
            "`devices` out, or pass keras.distribution.list_devices()."
        )
    if run is None or not run.is_chief or (run.mesh, run.batch_axis) == (layouts.mesh, layouts.batch_axis):
        return
    if run.mesh is not None:
        raise StrategyError(
            f"{set_one}, whose batch is divided along {layouts.batch_axis!r}, and {run.strategy or 'the strategy'} has "
            f"the mesh {run.mesh}, whose batch is divided along {run.batch_axis!r}. Remove one of the two, or use the "
            "same axes."
        )
    if run.strategy is not None:
        raise StrategyError(f"{set_one}, and {run.strategy} chooses another strategy. Remove one of the two.")
    raise StrategyError(
        f"{set_one}, after AutoDist(…) has started the workers without a mesh. Set the distribution before AutoDist(…) "
        "is called, or pass it as AutoDist(strategy=…)."
    )


def _require_whole_batches(distribution: Any) -> None:
    run = current_run()
    if shards_dataset(distribution) or run is None or run.workers == 1 or run.batch == "per_worker":
        return
    raise StrategyError(
        "keras.distribution's DataParallel is made with auto_shard_dataset=False: each process passes its own part of "
        f"the data. AutoDist takes the batches of `fit` as whole batches ({run.machines}) and gives each worker its "
        "part. Set `batch: per_worker` in the YAML, or leave auto_shard_dataset out and pass the whole data."
    )


@functools.cache
def _note_data_parallel(devices: int) -> None:
    log.info(
        "AutoDist trains as keras.distribution.DataParallel does: each batch is divided among the replicas that the "
        "YAML names, instead of the %s of Keras's mesh.", counted(devices, "device"), extra=ALIKE_EVERYWHERE,
    )  # fmt: skip
