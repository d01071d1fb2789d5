"""DirectRun: a run of a session that is prepared once, with what is fed handed over as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2

from autodist.errors import ClusterError


class DirectRun:
    """Runs the same fetches again and again, given values for the same feeds.

    `Session.make_callable` with feeds is `Session.run`, which looks at every fetch and feed anew each time: half of
    what a step of a small model takes. What TensorFlow prepares from `CallableOptions` does not, and does not check
    what is fed either, so that this is done here.

    Args:
        session: where to run.
        outputs: tensors that a run returns.
        operations: what runs without being returned.
        feeds: tensors that take values.
        options: of every run.
    """

    def __init__(
        self,
        session: tf.compat.v1.Session,
        outputs: Sequence[tf.Tensor],
        operations: Sequence[tf.Operation],
        feeds: Sequence[tf.Tensor],
        options: tf.compat.v1.RunOptions,
    ) -> None:
        different = list(dict.fromkeys(t.name for t in outputs))
        self._positions = [different.index(t.name) for t in outputs]
        self._feeds = [_Feed(t) for t in feeds]
        asked = config_pb2.CallableOptions(
            feed=[t.name for t in feeds], fetch=different, target=[op.name for op in operations], run_options=options
        )
        # TensorFlow refuses a run of nothing, as what another worker's part of a run may come to.
        is_nothing = not outputs and not operations
        self._session = session
        self._run = (lambda *values: []) if is_nothing else session._make_callable_from_options(asked)

    def __call__(self, *values: Any) -> list[np.ndarray]:
        """The values of the outputs.

        Raises:
            ValueError: a value has another shape than what it is for.
            ClusterError: the session is closed, as it is from the run's end on.
        """
        try:
            found = self._run(*[feed.taken(v) for feed, v in zip(self._feeds, values, strict=True)])
        except tf.errors.CancelledError:
            if not self._session._closed:
                raise
            raise ClusterError(
                "The run has ended, and no step is made any more. An exit handler that is registered before "
                "`AutoDist(…)` is called after the run's end: register it later, or make the step before that."
            ) from None
        return [found[k] for k in self._positions]


class _Feed:
    """A tensor that takes a value for each run."""

    def __init__(self, tensor: tf.Tensor) -> None:
        self._name, self._shape, self._dtype = tensor.name, tensor.shape, np.dtype(tensor.dtype.as_numpy_dtype)
        self._fitting: tuple[int, ...] | None = None

    def taken(self, value: Any) -> np.ndarray:
        array = np.asarray(value, self._dtype)
        if array.shape != self._fitting:  # runs mostly take the shape of the one before
            if not self._shape.is_compatible_with(array.shape):
                raise ValueError(f"{self._name} has the shape {self._shape} and cannot take a value of {array.shape}.")
            self._fitting = array.shape
        return array
