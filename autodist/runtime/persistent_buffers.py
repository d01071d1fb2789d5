"""Persistent buffers: state that kernels keep on a worker across steps, for example the residual of a compressor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import tensorflow as tf


@dataclass(frozen=True)
class Saved:
    """Values of persistent buffers in a checkpoint.

    Attributes:
        prefix: path of its files on this worker.
        keys: keys in the checkpoint, by buffer name.
    """

    prefix: str
    keys: Mapping[str, str]


@dataclass(frozen=True)
class _Buffer:
    """One persistent buffer in a session's graph."""

    session: tf.compat.v1.Session
    initializer: tf.Operation

    @property
    def handle(self) -> tf.Tensor:
        return self.initializer.inputs[0]

    @property
    def dtype(self) -> tf.DType:
        return self.initializer.inputs[1].dtype

    @property
    def shape(self) -> tf.TensorShape:
        return self.initializer.inputs[1].shape


class PersistentBuffers:
    """The persistent buffers of one worker."""

    def __init__(self) -> None:
        self._buffers: dict[str, _Buffer] = {}
        self._awaited: Saved | None = None

    @property
    def specs(self) -> dict[str, tf.TensorSpec]:
        """Shape and dtype of each buffer, by its name in TensorFlow on this worker."""
        return {name: tf.TensorSpec(buffer.shape, buffer.dtype) for name, buffer in self._buffers.items()}

    @property
    def awaited(self) -> list[str]:
        """Buffers that have a value in the restored checkpoint and that no step has created yet."""
        return [] if self._awaited is None else sorted(self._awaited.keys.keys() - self._buffers.keys())

    def begin(self, session: tf.compat.v1.Session, initializers: Iterable[tf.Operation]) -> None:
        """Registers buffers that these operations have initialized, and restores those with a checkpointed value."""
        new = {_name_of(op): _Buffer(session, op) for op in initializers if op.type == "AssignVariableOp"}
        self._buffers.update(new)
        if self._awaited is not None:
            self._restore(self._awaited, new)

    def resume(self, saved: Saved) -> None:
        """Restores buffers from a checkpoint; buffers that are missing in it are initialized again.

        A buffer that no step has created yet is restored when it is created.
        """
        self._awaited = saved
        for name, buffer in self._buffers.items():
            if name not in saved.keys:
                buffer.session.run(buffer.initializer)
        self._restore(saved, self._buffers)

    def _restore(self, saved: Saved, among: Mapping[str, _Buffer]) -> None:
        for name in sorted(saved.keys.keys() & among.keys()):
            buffer = among[name]
            with buffer.session.graph.as_default(), tf.device(buffer.initializer.device):
                (value,) = tf.raw_ops.RestoreV2(
                    prefix=saved.prefix,
                    tensor_names=[saved.keys[name]],
                    shape_and_slices=[""],
                    dtypes=[buffer.dtype],
                )
                value.set_shape(buffer.shape)
                write = tf.raw_ops.AssignVariableOp(resource=buffer.handle, value=value)
            buffer.session.run(write)


def _name_of(initializer: tf.Operation) -> str:
    return initializer.inputs[0].op.get_attr("shared_name").decode()
