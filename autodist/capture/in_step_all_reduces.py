"""Records in-step all-reduces: calls of `tf.distribute`'s all-reduce and all-gather in a step.

Keras's synchronized batch normalization sums through the replica context of `tf.distribute`, and contrastive losses
gather rows through it. Without a strategy these calls return their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import tensorflow as tf

from autodist.capture.graphs import records_here
from autodist.capture.keras.distribution.run_settings import current_run
from autodist.errors import CaptureError
from autodist.graph.in_step_all_reduce import SUM_NAME, InStepAllReduce, InStepAllReduceKind
from autodist.tf_compat.patches import (
    ALL_GATHER,
    ALL_REDUCE,
    BATCH_NORM_MOMENTS,
    BATCH_NORM_SUM,
    OPTIMIZER_ALL_REDUCE,
    patched,
    replaced,
)


@dataclass(frozen=True)
class RecordedAllReduce:
    """A recorded in-step all-reduce.

    Attributes:
        graph: the graph of its placeholder.
        all_reduce: the all-reduce.
    """

    graph: tf.Graph
    all_reduce: InStepAllReduce


@dataclass
class AllReduceNotes:
    """The recorded in-step all-reduces, in order.

    Attributes:
        sums: the all-reduces.
        in_functions: True to record in graphs of functions, False in plain graphs.
    """

    in_functions: bool
    sums: list[RecordedAllReduce] = field(default_factory=list)

    def all_reduced(self, value: tf.Tensor, is_mean: bool = False, is_asked: bool = True) -> tf.Tensor:
        """Returns a placeholder for the sum of a value over all replicas.

        Its gradient is the sum of the replicas' gradients.
        """
        return self._standing_for(value, value.shape, InStepAllReduce("", is_mean=is_mean, is_asked=is_asked))

    def gathered(self, value: tf.Tensor, axis: int, is_asked: bool = True) -> tf.Tensor:
        """Returns a placeholder for the rows of all replicas.

        Its gradient is this replica's rows of the gradients' sum over all replicas.

        Args:
            value: a tensor with a row for each example.
            axis: the axis of the rows, counted from 0.
        """
        rows = tf.TensorShape([None if a == axis else length for a, length in enumerate(value.shape)])
        how = InStepAllReduce("", how=InStepAllReduceKind.ROWS, axis=axis, is_asked=is_asked)
        return self._standing_for(value, rows, how)

    def _standing_for(self, value: tf.Tensor, shape: tf.TensorShape, whole: InStepAllReduce) -> tf.Tensor:
        @tf.custom_gradient
        def standing_for(value: tf.Tensor) -> tuple[tf.Tensor, Callable[..., tf.Tensor]]:
            made = tf.raw_ops.PlaceholderWithDefault(input=value, shape=shape, name=SUM_NAME)
            noted = replace(whole, node=made.op.name)
            self.sums.append(RecordedAllReduce(made.graph, noted))
            gradient = replace(noted, of=noted.of or noted.node, how=_GRADIENTS[whole.how])

            def backward(upstream: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
                return self._standing_for(tf.convert_to_tensor(upstream), value.shape, gradient)

            return made, backward

        return standing_for(value)


_GRADIENTS = {
    InStepAllReduceKind.SUM: InStepAllReduceKind.SUM,
    InStepAllReduceKind.ROWS: InStepAllReduceKind.OWN_ROWS,
    InStepAllReduceKind.OWN_ROWS: InStepAllReduceKind.ROWS,
}


@contextmanager
def recording_all_reduces(in_functions: bool) -> Iterator[AllReduceNotes]:
    """Records in-step all-reduces while the context is open.

    Args:
        in_functions: True to record in graphs of functions, False in plain graphs.
    """
    notes = AllReduceNotes(in_functions)
    plain = tf.distribute.ReplicaContext.all_reduce

    def is_recorded(values: Sequence[Any]) -> bool:
        are_tensors = bool(values) and all(tf.is_symbolic_tensor(v) for v in values)
        return records_here(in_functions) and are_tensors and not tf.distribute.has_strategy()

    def noted(all_reduce: Any, self: Any, reduce_op: Any, value: Any, options: Any = None) -> Any:
        flat = tf.nest.flatten(value)
        if not is_recorded(flat):
            return all_reduce(self, reduce_op, value, options)
        is_mean = getattr(reduce_op, "name", str(reduce_op)).upper() == "MEAN"
        return tf.nest.pack_sequence_as(value, [notes.all_reduced(v, is_mean) for v in flat])

    def gathered(all_gather: Any, self: Any, value: Any, axis: Any, options: Any = None) -> Any:
        flat = tf.nest.flatten(value)
        if not is_recorded(flat):
            return all_gather(self, value, axis, options)
        return tf.nest.pack_sequence_as(value, [notes.gathered(v, _axis_of(v, axis)) for v in flat])

    def not_noted(of_gradients: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        with replaced(ALL_REDUCE.owner(), ALL_REDUCE.method, plain):
            return of_gradients(self, *args, **kwargs)

    def of_all_replicas(moments: Any, self: keras.layers.BatchNormalization, inputs: Any, mask: Any) -> Any:
        if not records_here(in_functions) or not (self.synchronized or _normalizes_whole_batches()):
            return moments(self, inputs, mask)
        if mask is not None:
            with _sums_are_whole(notes):  # with a mask, Keras sums over its own replica only
                return moments(self, inputs, mask)
        with _synchronized(self):
            return moments(self, inputs, mask)

    with patched(
        {ALL_REDUCE: noted, ALL_GATHER: gathered, OPTIMIZER_ALL_REDUCE: not_noted, BATCH_NORM_MOMENTS: of_all_replicas}
    ):
        yield notes


def _normalizes_whole_batches() -> bool:
    run = current_run()
    return run is not None and run.normalizes_whole_batches and not run.is_reference


@contextmanager
def _synchronized(layer: keras.layers.BatchNormalization) -> Iterator[None]:
    """Makes a layer compute the moments of all replicas' examples while the context is open."""
    before = layer.synchronized
    layer.synchronized = True
    try:
        yield
    finally:
        layer.synchronized = before


@contextmanager
def _sums_are_whole(notes: AllReduceNotes) -> Iterator[None]:
    """Records the sums of Keras's batch normalization as in-step all-reduces while the context is open."""

    def whole(plain: Any, *args: Any, **kwargs: Any) -> Any:
        return notes.all_reduced(plain(*args, **kwargs))

    with patched({BATCH_NORM_SUM: whole}):
        yield


def _axis_of(value: tf.Tensor, axis: Any) -> int:
    """Returns the axis of an all-gather call, counted from 0.

    Raises:
        CaptureError: the axis does not exist, or is not known before the step runs.
    """
    static, rank = tf.get_static_value(axis), value.shape.rank
    if static is None or rank is None or not -rank <= int(static) < rank:
        raise CaptureError(
            f"all_gather cannot gather {value.name} of shape {value.shape} along axis {axis}: the axis does not exist "
            "or is unknown. Pass a number below the rank (tf.ensure_shape sets the rank)."
        )
    return int(static) % rank
