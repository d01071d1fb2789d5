"""Strategies of `tf.distribute`, which would share out what AutoDist shares out itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from autodist.capture.patches import STRATEGY_SCOPE, patched
from autodist.errors import CaptureError


@functools.cache
def _default() -> type[Any]:
    """The class of TensorFlow's default strategy, which is there where the script has none and shares out nothing.

    A graph of its own, since no scope of the script's is open there. It is not asked for by the import, because
    TensorFlow begins a thread with its first graph, and a script may fork before it makes any.
    """
    with tf.Graph().as_default():
        return type(tf.distribute.get_strategy())


def require_no_strategy(strategy: Any, what: str) -> None:
    """Passes unless `strategy` is one that the script has made.

    Args:
        strategy: of `tf.distribute`.
        what: stands under it, and AutoDist is to distribute it.

    Raises:
        CaptureError: it is.
    """
    if not isinstance(strategy, _default()):
        raise CaptureError(
            f"{what} stands under tf.distribute's {type(strategy).__name__}, which would share out once more what "
            "AutoDist shares out over the replicas, and its variables are none that AutoDist can place. Take the "
            "strategy out: ad.scope() stands in the place of strategy.scope(), ad.distribute_dataset in that of "
            "strategy.experimental_distribute_dataset, and strategy.run(step, args) becomes step(*args)."
        )


@contextmanager
def refusing_strategies() -> Iterator[None]:
    """Refuses strategies of `tf.distribute` around it and, while it is open, within it.

    Raises:
        CaptureError: one is; where it is opened, or runs something.
    """
    require_no_strategy(tf.distribute.get_strategy(), "what is built here")

    def scope(plain: Any, self: Any) -> Any:
        require_no_strategy(self, "what is built here")
        return plain(self)

    with patched({STRATEGY_SCOPE: scope}):
        yield
