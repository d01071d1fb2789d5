"""Rejects strategies of `tf.distribute`, which AutoDist replaces."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from autodist.errors import CaptureError
from autodist.tf_compat.patches import STRATEGY_SCOPE, patched


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
