"""Checks distributions of `keras.distribution`, which Keras accepts and ignores on TensorFlow."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from autodist.errors import CaptureError
from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.tf_compat.patches import SET_DISTRIBUTIONS, patched

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
