"""Memory: a variable of a kernel's own, which this worker keeps from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf


@dataclass(frozen=True)
class PersistentBuffer:
    """One variable, read once a step and written once.

    Attributes:
        name: under which TensorFlow keeps it on this worker.
        value: that it holds when the step begins.
        initializer: the operation that gives it its first value.
    """

    name: str
    value: tf.Tensor
    initializer: tf.Operation
    _handle: tf.Tensor

    @classmethod
    def make(cls, name: str, initial: tf.Tensor) -> PersistentBuffer:
        """Builds it in the graph that is built just now."""
        handle = tf.raw_ops.VarHandleOp(dtype=initial.dtype, shape=initial.shape, shared_name=name)
        initializer = tf.raw_ops.AssignVariableOp(resource=handle, value=initial)
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=initial.dtype)
        value.set_shape(initial.shape)
        return cls(name, value, initializer, handle)

    def write_if(self, condition: tf.Tensor, value: tf.Tensor) -> tf.Operation:
        """Writes `value` where `condition` (a scalar) holds; otherwise it keeps what it has."""
        # Select takes a scalar condition as it is, where tf.where would make one for each element.
        kept = tf.raw_ops.Select(condition=condition, x=value, y=self.value)
        return tf.raw_ops.AssignVariableOp(resource=self._handle, value=kept)
