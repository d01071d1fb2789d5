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
    """One persistent buffer in a session's graph.

    Attributes:
        session: the session.
        handle: its handle.
        initializer: the operation that initializes it; None for a variable that has another origin.
    """

    session: tf.compat.v1.Session
    handle: tf.Tensor
    initializer: tf.Operation | None

    @classmethod
    def of(cls, session: tf.compat.v1.Session, operation: tf.Operation) -> _Buffer | None:
        """Returns the buffer of an operation that runs before the first step; None if it sets another state."""
        if operation.type == "VarHandleOp":
            return cls(session, operation.outputs[0], None)
        return cls(session, operation.inputs[0], operation) if operation.type == "AssignVariableOp" else None

    @property
    def name(self) -> str:
        return str(self.handle.op.get_attr("shared_name").decode())

    @property
    def dtype(self) -> tf.DType:
        return tf.as_dtype(self.handle.op.get_attr("dtype"))

    @property
    def shape(self) -> tf.TensorShape:
        return tf.TensorShape(self.handle.op.get_attr("shape"))


class PersistentBuffers:
    """The persistent buffers of one worker, and its own copies of variables, which checkpoints save for each worker."""

    def __init__(self) -> None:
        self._buffers: dict[str, _Buffer] = {}
        self._awaited: Saved | None = None
        self._to_restore: set[str] = set()

    @property
    def specs(self) -> dict[str, tf.TensorSpec]:
        """Shape and dtype of each buffer, by its name in TensorFlow on this worker.

        The buffers then have the values of the restored checkpoint, or what steps since have made of them.
        """
        self._restore_awaited()
        return {name: tf.TensorSpec(buffer.shape, buffer.dtype) for name, buffer in self._buffers.items()}

    @property
    def awaited(self) -> list[str]:
        """Buffers that have a value in the restored checkpoint and that no step has created yet."""
        return [] if self._awaited is None else sorted(self._awaited.keys.keys() - self._buffers.keys())

    def begin(self, session: tf.compat.v1.Session, operations: Iterable[tf.Operation]) -> None:
        """Registers the buffers that these operations have initialized or name."""
        made = (_Buffer.of(session, operation) for operation in operations)
        new = {buffer.name: buffer for buffer in made if buffer is not None}
        self._buffers.update(new)
        self._to_restore |= new.keys()

    def resume(self, saved: Saved) -> None:
        """Sets the checkpoint to restore buffers from; buffers that are missing in it are initialized again.

        A buffer is restored before the first step that has it: after the script's variables have been assigned, which
        also sets their copies.
        """
        self._awaited = saved
        for name, buffer in self._buffers.items():
            if name not in saved.keys and buffer.initializer is not None:
                buffer.session.run(buffer.initializer)
        self._to_restore = set(self._buffers)

    def begin_step(self) -> None:
        """Restores the buffers that have a value in the checkpoint, unless a step has begun since."""
        self._restore_awaited()
        self._to_restore.clear()

    def _restore_awaited(self) -> None:
        if self._to_restore and self._awaited is not None:
            self._restore(self._awaited, {name: self._buffers[name] for name in self._to_restore})

    def _restore(self, saved: Saved, among: Mapping[str, _Buffer]) -> None:
        for name in sorted(saved.keys.keys() & among.keys()):
            buffer = among[name]
            with buffer.session.graph.as_default(), tf.device(buffer.handle.device):
                (value,) = tf.raw_ops.RestoreV2(
                    prefix=saved.prefix,
                    tensor_names=[saved.keys[name]],
                    shape_and_slices=[""],
                    dtypes=[buffer.dtype],
                )
                value.set_shape(buffer.shape)
                write = tf.raw_ops.AssignVariableOp(resource=buffer.handle, value=value)
            buffer.session.run(write)
