"""Rejects strategies of `tf.distribute` and distributions of `keras.distribution`, which AutoDist replaces."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from autodist.errors import CaptureError
from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.tf_compat.patches import SET_DISTRIBUTIONS, STRATEGY_SCOPE, patched


@functools.cache
def _default() -> type[Any]:
    """Returns the class of TensorFlow's default strategy, which is active if the script uses none and splits nothing.

    It is computed in its own graph, outside the script's scopes, and not at import: TensorFlow starts a thread with its
    first graph, and a script may fork before.
    """
    with tf.Graph().as_default():
        return type(tf.distribute.get_strategy())


def require_no_strategy(strategy: Any, what: str) -> None:
    """Checks that `strategy` is TensorFlow's default one.

    Args:
        strategy: a strategy of `tf.distribute`.
        what: the subject of the error message, which is used under the strategy.

    Raises:
        CaptureError: the strategy is one of the script's.
    """
    if not isinstance(strategy, _default()):
        raise CaptureError(
            f"{what} is used under tf.distribute's {type(strategy).__name__}, which would split again the batches "
            "that AutoDist splits over the replicas, and AutoDist cannot place its variables. Remove the "
            "strategy: ad.scope() replaces strategy.scope(), ad.distribute_dataset replaces "
            "strategy.experimental_distribute_dataset, and strategy.run(step, args) becomes step(*args)."
        )


@contextmanager
def refusing_strategies() -> Iterator[None]:
    """Rejects a strategy of `tf.distribute` that is active at entry, or entered while the context is open.

    Raises:
        CaptureError: a strategy is active, or enters its scope.
    """
    require_no_strategy(tf.distribute.get_strategy(), "the code in this scope")

    def scope(plain: Any, self: Any) -> Any:
        require_no_strategy(self, "the code in this scope")
        return plain(self)

    with patched({STRATEGY_SCOPE: scope}):
        yield


log = logging.getLogger("autodist")


def check_distribution(distribution: Any) -> None:
    """Accepts None and `DataParallel`, which trains as AutoDist does, with the replicas in place of its devices.

    Raises:
        CaptureError: the distribution is another one: `ModelParallel`, or a class of the script.
    """
    if distribution is None:
        return
    if type(distribution) is keras.distribution.DataParallel:
        _note_data_parallel(distribution.device_mesh.devices.size)
        return
    raise CaptureError(
        f"keras.distribution's {type(distribution).__name__} is set, which Keras ignores on TensorFlow: every replica "
        "would hold and compute the whole model, and AutoDist does not read its layouts. Remove it "
        "(keras.distribution.set_distribution(None), or no `with distribution.scope():`); `strategy: PartitionedPS` or "
        "ShardedAllReduce in the YAML keeps variables in shards, and Pipeline divides the model."
    )


def check_current_distribution() -> None:
    """Checks the current distribution, as `check_distribution` does."""
    check_distribution(keras.distribution.distribution())


@functools.cache
def _note_data_parallel(devices: int) -> None:
    log.info(
        "AutoDist trains as keras.distribution.DataParallel does: each batch is divided among the replicas that the "
        "YAML names, instead of the %d devices of Keras's mesh.", devices, extra=ALIKE_EVERYWHERE,
    )  # fmt: skip


@contextmanager
def checking_distributions() -> Iterator[None]:
    """Checks the current distribution at entry, and each one that is set while the context is open.

    Raises:
        CaptureError: a distribution is neither None nor `DataParallel`.
    """
    check_current_distribution()

    def set_distribution(plain: Any, value: Any) -> None:
        check_distribution(value)
        plain(value)

    with patched(dict.fromkeys(SET_DISTRIBUTIONS, set_distribution)):
        yield
    check_current_distribution()  # the script may have called a name that it imported earlier
