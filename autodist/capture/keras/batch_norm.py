"""Captures Keras's batch normalization as TensorFlow's fused op, whose gradient is one op too.

Keras computes moments of the batch and scales each example by these. Both, and the many ops of their gradient, pass
over the activations repeatedly; `FusedBatchNormV3` and its gradient pass over them once each.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from autodist.capture.graphs import is_of_function
from autodist.graph.editor import GraphEditor
from autodist.tf_compat.patches import BATCH_NORM_CALL, MOMENTS, NORMALIZE, SECOND_BATCH_NORM_GRADIENT, patched

_AXES = (0, 1, 2)
"""Axes of the moments: all but the channels, which are last."""

_LEAST_EPSILON = 1.001e-5
"""Least epsilon that TensorFlow's own layer passes to cuDNN (`tf.compat.v1.nn.fused_batch_norm`)."""


@dataclass(frozen=True)
class _Moments:
    """A mean and variance computed in a layer."""

    x: tf.Tensor
    mean: tf.Tensor
    variance: tf.Tensor


@dataclass(frozen=True)
class _Fused:
    """A fused op that replaces moments and the normalization by them.

    Attributes:
        node: the op.
        moments: Keras's moments.
        mean: the op's mean, equal to that of `moments`.
        variance: the op's variance, equal to that of `moments`.
    """

    node: str
    moments: _Moments
    mean: tf.Tensor
    variance: tf.Tensor


@dataclass
class FusedNorms:
    """The fused batch normalizations.

    Attributes:
        are_differentiated_twice: True if second derivatives are computed. Those of the op differ from those of Keras's
            arithmetic, since `tf.nn.moments` treats the mean within the variance as a constant.
    """

    are_differentiated_twice: bool = False
    _made: dict[int, _Moments] = field(default_factory=dict)
    _fused: list[_Fused] = field(default_factory=list)
    _thread: int = field(default_factory=threading.get_ident)
    _layers: int = 0

    @property
    def is_in_a_layer(self) -> bool:
        return self._layers > 0

    @contextmanager
    def inside_a_layer(self) -> Iterator[None]:
        """Open during the call of a Keras layer; moments in the script's own code may be differentiated by."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._layers += 1
        try:
            yield
        finally:
            self._layers -= 1

    def note_moments(self, x: Any, axes: Any, mean: tf.Tensor, variance: tf.Tensor) -> None:
        """Records moments for `fuse` if the fused op can compute them."""
        if not self._looks_here() or not _can_be_fused(x) or not isinstance(axes, list | tuple):
            return
        if tuple(axes) == _AXES and mean.shape == x.shape[-1:]:
            self._made[id(mean)] = _Moments(x, mean, variance)

    def fuse(self, x: Any, mean: Any, variance: Any, offset: Any, scale: Any, epsilon: float) -> tf.Tensor | None:
        """Returns x normalized by the fused op, or None if mean and variance are not the moments of x."""
        if not self._looks_here() or not _can_be_fused(x):
            return None
        channels = x.shape[-1:]
        mean, variance = _without_reshape(mean, channels), _without_reshape(variance, channels)
        moments = self._made.get(id(mean))
        if moments is None or moments.x is not x or moments.variance is not variance or epsilon < _LEAST_EPSILON:
            return None
        scale = tf.ones(channels) if scale is None else _without_reshape(scale, channels)
        offset = tf.zeros(channels) if offset is None else _without_reshape(offset, channels)
        if not all(p.dtype == tf.float32 and p.shape == channels for p in (scale, offset)):
            return None
        nothing = tf.constant([], tf.float32)
        y, own_mean, own_variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=scale, offset=offset, mean=nothing, variance=nothing, epsilon=epsilon, name="batchnorm"
        )
        self._fused.append(_Fused(y.op.name, moments, own_mean, _of_the_batch(own_variance, x)))
        return y

    def share_moments(self, editor: GraphEditor, graph: tf.Graph) -> None:
        """Computes moving averages from the moments of the fused op, so that the separate ones can be pruned.

        Keras updates the averages before it normalizes, so this runs on the finished graph. Gradients stay correct: the
        values are equal, and a gradient through the separate moments was built when these were read.
        """
        made = [moments for moments in self._made.values() if moments.x.graph is graph]
        fused = [one for one in self._fused if one.moments.x.graph is graph]
        order = {t.op.name: k for k, moments in enumerate(made) for t in (moments.mean, moments.variance)}
        # An op runs after its scale and offset. If these depend on moments that are no older than the op's own (those
        # of batch renormalization do), a reader of the moments may run before the op.
        free = []
        for one in fused:
            before = editor.ancestors(editor[one.node].input[1:]) & order.keys()
            if all(order[name] < order[one.moments.mean.op.name] for name in before):
                free.append(one)
        for one in free:
            editor.rewire(one.moments.mean.name, one.mean.name)
            editor.rewire(one.moments.variance.name, one.variance.name)

    def _looks_here(self) -> bool:
        """Returns True while a Keras layer is traced into a step, outside of the bodies of loops and conditionals."""
        if threading.get_ident() != self._thread or not self.is_in_a_layer or tf.executing_eagerly():
            return False
        graph = tf.compat.v1.get_default_graph()
        return is_of_function(graph) and not is_of_function(graph.outer_graph)


def _can_be_fused(x: Any) -> bool:
    here = tf.is_symbolic_tensor(x) and x.graph is tf.compat.v1.get_default_graph()
    return here and x.dtype == tf.float32 and x.shape.rank == 4 and x.shape[-1] is not None


def _without_reshape(value: Any, channels: tf.TensorShape) -> tf.Tensor:
    """Returns one number a channel, without the axes of length one that Keras adds for `axis=3`."""
    value = tf.convert_to_tensor(value)
    if tf.is_symbolic_tensor(value) and value.op.type == "Reshape" and value.shape == [1, 1, 1, *channels]:
        return value.op.inputs[0]
    return value


def _of_the_batch(unbiased: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Returns the variance of a batch of n numbers, for each channel, from the unbiased estimate: times (n - 1) / n.

    It is 0 for a single number. n is the size of the replica's part, so it is not read from the traced shape.
    """
    count = tf.cast(tf.raw_ops.Size(input=x, out_type=tf.int64), tf.float32)
    return tf.math.multiply_no_nan(unbiased, 1 - x.shape[-1] / count)


@contextmanager
def fusing_batch_norms() -> Iterator[FusedNorms]:
    """Traces Keras's batch normalization as one fused op on this thread while the context is open.

    That applies to training in float32 on images with channels last. Inference, masks, synchronized statistics, other
    ranks and dtypes, and calls in the body of a loop are traced as Keras writes them. A step that turns out to be
    differentiated twice has to be traced again without.
    """
    norms = FusedNorms()

    def noted_moments(moments: Any, x: Any, axes: Any, *args: Any, **kwargs: Any) -> Any:
        mean, variance = moments(x, axes, *args, **kwargs)
        norms.note_moments(x, axes, mean, variance)
        return mean, variance

    def fused_or_not(
        plain: Any, x: Any, mean: Any, variance: Any, offset: Any, scale: Any, variance_epsilon: Any, *a: Any, **k: Any
    ) -> Any:
        y = norms.fuse(x, mean, variance, offset, scale, variance_epsilon)
        return plain(x, mean, variance, offset, scale, variance_epsilon, *a, **k) if y is None else y

    def call_layer(call: Any, self: keras.layers.BatchNormalization, /, *args: Any, **kwargs: Any) -> Any:
        with norms.inside_a_layer():
            return call(self, *args, **kwargs)

    def noted_second(differentiate_again: Any, *args: Any) -> Any:
        norms.are_differentiated_twice = True
        return differentiate_again(*args)

    with patched(
        {
            MOMENTS: noted_moments,
            NORMALIZE: fused_or_not,
            BATCH_NORM_CALL: call_layer,
            SECOND_BATCH_NORM_GRADIENT: noted_second,
        }
    ):
        yield norms
