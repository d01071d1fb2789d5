"""Notes whole sums where a step asks for them: what layers give to `tf.distribute`'s all-reduce.

Keras's synchronized batch normalisation asks the replica context of `tf.distribute` to add up its sums; without a
strategy that gives them back as they are.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from autodist.graph.whole_sums import SUM_NAME

_OF_OPTIMIZERS = "_all_reduce_sum_gradients"
"""Keras's optimizers add up gradients there, which the kernels do."""


@dataclass(frozen=True)
class NotedSum:
    """A sum over all replicas, or a mean.

    Attributes:
        graph: in which it is made.
        node: the PlaceholderWithDefault that stands for it.
        of: the node of that of which it is the gradient; None: of none.
        is_mean: whether it is a mean.
    """

    graph: tf.Graph
    node: str
    of: str | None
    is_mean: bool


@dataclass
class SumNotes:
    """What was noted, in order.

    Attributes:
        sums: the sums.
        in_functions: whether graphs of functions are looked at, or else plain graphs.
    """

    in_functions: bool
    sums: list[NotedSum] = field(default_factory=list)

    def looks_here(self) -> bool:
        if tf.executing_eagerly():
            return False
        return isinstance(tf.compat.v1.get_default_graph(), tf.__internal__.FuncGraph) == self.in_functions

    def whole(self, value: tf.Tensor, is_mean: bool = False, of: str | None = None) -> tf.Tensor:
        """What stands for the sum of a value over all replicas; so does its gradient for that of all gradients."""

        @tf.custom_gradient
        def standing_for(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            made = tf.raw_ops.PlaceholderWithDefault(input=value, shape=value.shape, name=SUM_NAME)
            self.sums.append(NotedSum(made.graph, made.op.name, of, is_mean))
            return made, lambda upstream: self.whole(upstream, is_mean, of or made.op.name)

        return standing_for(value)


@contextmanager
def noting_sums(in_functions: bool) -> Iterator[SumNotes]:
    """Notes what is added up over replicas while the context is open.

    Args:
        in_functions: whether in graphs of functions, or else in plain graphs.
    """
    notes = SumNotes(in_functions)
    context = next(base for base in tf.distribute.ReplicaContext.__mro__ if "all_reduce" in vars(base))
    optimizer = next(base for base in keras.Optimizer.__mro__ if _OF_OPTIMIZERS in vars(base))
    all_reduce, of_gradients = context.all_reduce, getattr(optimizer, _OF_OPTIMIZERS)
    moments = keras.layers.BatchNormalization._moments

    @functools.wraps(all_reduce)
    def noted(self: Any, reduce_op: Any, value: Any, options: Any = None) -> Any:
        flat = tf.nest.flatten(value)
        if not notes.looks_here() or not _are_tensors(flat) or tf.distribute.has_strategy():
            return all_reduce(self, reduce_op, value, options)
        is_mean = getattr(reduce_op, "name", str(reduce_op)).upper() == "MEAN"
        return tf.nest.pack_sequence_as(value, [notes.whole(v, is_mean) for v in flat])

    @functools.wraps(of_gradients)
    def not_noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _replaced(context, "all_reduce", all_reduce):
            return of_gradients(self, *args, **kwargs)

    @functools.wraps(moments)
    def with_mask(self: keras.layers.BatchNormalization, inputs: Any, mask: Any) -> Any:
        if mask is None or not self.synchronized or not notes.looks_here():
            return moments(self, inputs, mask)
        with _sums_are_whole(notes):  # Keras asks for nobody else's sums there
            return moments(self, inputs, mask)

    with (
        _replaced(context, "all_reduce", noted),
        _replaced(optimizer, _OF_OPTIMIZERS, not_noted),
        _replaced(keras.layers.BatchNormalization, "_moments", with_mask),
    ):
        yield notes


@contextmanager
def _sums_are_whole(notes: SumNotes) -> Iterator[None]:
    """While it is open, what the code of batch normalisation adds up is added up over all replicas."""
    operations = vars(sys.modules[keras.layers.BatchNormalization.__module__])["ops"]
    plain = operations.sum

    @functools.wraps(plain)
    def whole(*args: Any, **kwargs: Any) -> Any:
        return notes.whole(plain(*args, **kwargs))

    with _replaced(operations, "sum", whole):
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    plain = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, plain)


def _are_tensors(values: Sequence[Any]) -> bool:
    return bool(values) and all(tf.is_symbolic_tensor(v) for v in values)
