"""The fetches of a run that is made repeatedly, usually without and sometimes with TensorFlow's run options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from autodist.runtime.graph_runner import GraphRunner
from autodist.runtime.timeline import TraceFile

RunOptions = Any
"""`tf.compat.v1.RunOptions`, for which TensorFlow has no types."""
RunMetadata = Any
"""`tf.compat.v1.RunMetadata`."""


@dataclass(frozen=True)
class Runnable:
    """A run of a graph runner.

    Attributes:
        graph_runner: the graph runner.
        outputs: tensors that it returns.
        operations: targets that run in addition.
        feeds: names of the tensors that are fed.
        has_collectives: True if other workers' runs take part in it.
        trace: file for a trace of one run; None: no run is traced.
    """

    graph_runner: GraphRunner
    outputs: Sequence[tf.Tensor]
    operations: Sequence[tf.Operation]
    feeds: Sequence[str]
    has_collectives: bool = False
    trace: TraceFile | None = None

    def __post_init__(self) -> None:
        _ = self._plain  # now: TensorFlow refuses faulty fetches before the first run

    def with_options(self, options: RunOptions | None, metadata: RunMetadata | None) -> Callable[..., list[np.ndarray]]:
        """Returns a callable that takes a value for each feed.

        Args:
            options: TensorFlow's options; None: the defaults.
            metadata: filled with TensorFlow's metadata of the run; None: there is none.
        """
        if options is None and metadata is None:
            return self._plain
        return functools.partial(self._with_options, options=options, run_metadata=metadata)

    @functools.cached_property
    def _plain(self) -> Callable[..., list[np.ndarray]]:
        return self.graph_runner.callable(self.outputs, self.operations, self.feeds, self.has_collectives, self.trace)

    @functools.cached_property
    def _with_options(self) -> Callable[..., list[np.ndarray]]:
        """The callable that accepts options; made on first use, since its runs are slower."""
        return self.graph_runner.callable_with_options(self.outputs, self.operations, self.feeds, self.has_collectives)
