"""Batch normalisation of Keras is captured as TensorFlow's one op for it, which has a gradient of one op.

Keras writes it as arithmetic: the moments of a batch, and each example scaled by these. Both, and the many ops of their
gradient, pass over the activations again and again; `FusedBatchNormV3` and its gradient do so once each.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from autodist.capture.patches import BATCH_NORM_CALL, MOMENTS, NORMALIZE, SECOND_BATCH_NORM_GRADIENT, patched
from autodist.graph.editor import GraphEditor

_AXES = (0, 1, 2)
"""Over which the moments are taken: all but the channels, which stand last."""

_LEAST_EPSILON = 1.001e-5
"""What TensorFlow's own layer asks of cuDNN at least (`tf.compat.v1.nn.fused_batch_norm`)."""


@dataclass(frozen=True)
class _Moments:
    """A mean and variance that were made in a layer.

    Attributes:
        x: of which they are.
        mean: of each channel.
        variance: likewise.
    """

    x: tf.Tensor
    mean: tf.Tensor
    variance: tf.Tensor


@dataclass(frozen=True)
class _Fused:
    """An op that stands for moments and for what was made with them.

    Attributes:
        node: the op.
        moments: what Keras made.
        mean: the op's own, the same as that of `moments`.
        variance: likewise.
    """

    node: str
    moments: _Moments
    mean: tf.Tensor
    variance: tf.Tensor


@dataclass
class FusedNorms:
    """The batch normalisations that were fused.

    Attributes:
        are_differentiated_twice: whether somebody asks for second derivatives. The op's are those of its maths; Keras's
            arithmetic has others, since `tf.nn.moments` takes the mean within the variance for a constant.
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
        """Open while a layer of Keras computes; moments that a script makes itself may be differentiated by."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._layers += 1
        try:
            yield
        finally:
            self._layers -= 1

    def note_moments(self, x: Any, axes: Any, mean: tf.Tensor, variance: tf.Tensor) -> None:
        """Remembers moments for `fuse`, if one op can make them."""
        if not self._looks_here() or not _can_be_fused(x) or not isinstance(axes, list | tuple):
            return
        if tuple(axes) == _AXES and mean.shape == x.shape[-1:]:
            self._made[id(mean)] = _Moments(x, mean, variance)

    def fuse(self, x: Any, mean: Any, variance: Any, offset: Any, scale: Any, epsilon: float) -> tf.Tensor | None:
        """x normalised by one op, if mean and variance are the moments of just this x."""
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
        """Moving averages are made from the moments of the op, so that separate ones can be pruned.

        Keras updates the averages before it normalises, so this is done when the graph is whole. Gradients stay right:
        the values are the same, and the gradient by x through the separate moments, if anyone asked for it, was made
        when these were read.

        Args:
            editor: of the graph's definition.
            graph: in which the ops were made.
        """
        made = [moments for moments in self._made.values() if moments.x.graph is graph]
        fused = [one for one in self._fused if one.moments.x.graph is graph]
        order = {t.op.name: k for k, moments in enumerate(made) for t in (moments.mean, moments.variance)}
        # An op comes after its scale and offset. Where these come from moments that were made no earlier than the op's
        # own (in batch renormalisation from just these), a reader of the moments may stand before the op.
        free = []
        for one in fused:
            before = editor.ancestors(editor[one.node].input[1:]) & order.keys()
            if all(order[name] < order[one.moments.mean.op.name] for name in before):
                free.append(one)
        for one in free:
            editor.rewire(one.moments.mean.name, one.mean.name)
            editor.rewire(one.moments.variance.name, one.variance.name)

    def _looks_here(self) -> bool:
        """Whether a layer of Keras is being traced into a step, and not into the body of a loop or condition in it."""
        if threading.get_ident() != self._thread or not self.is_in_a_layer or tf.executing_eagerly():
            return False
        graph = tf.compat.v1.get_default_graph()
        of_function = tf.__internal__.FuncGraph
        return isinstance(graph, of_function) and not isinstance(graph.outer_graph, of_function)


def _can_be_fused(x: Any) -> bool:
    here = tf.is_symbolic_tensor(x) and x.graph is tf.compat.v1.get_default_graph()
    return here and x.dtype == tf.float32 and x.shape.rank == 4 and x.shape[-1] is not None


def _without_reshape(value: Any, channels: tf.TensorShape) -> tf.Tensor:
    """One number a channel, before it was given axes of length one to stand beside x, as Keras does for `axis=3`."""
    value = tf.convert_to_tensor(value)
    if tf.is_symbolic_tensor(value) and value.op.type == "Reshape" and value.shape == [1, 1, 1, *channels]:
        return value.op.inputs[0]
    return value


def _of_the_batch(unbiased: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """The variance of a batch of n numbers, for each channel, from the unbiased estimate: times (n - 1) / n.

    Of a single number it is 0. n is that of the replica's part, so it is not taken from the shape which the step is
    traced with.
    """
    count = tf.cast(tf.raw_ops.Size(input=x, out_type=tf.int64), tf.float32)
    return tf.math.multiply_no_nan(unbiased, 1 - x.shape[-1] / count)


@contextmanager
def fusing_batch_norms() -> Iterator[FusedNorms]:
    """While it is open, Keras's batch normalisation is traced by this thread as one op, where one can do it.

    That is in training, in float32, for images with their channels last. All else is traced as ever: inference, masks,
    statistics that are synchronised, other ranks and dtypes, calls in the body of a loop. A step that turns out to be
    differentiated twice is to be traced again without.
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
