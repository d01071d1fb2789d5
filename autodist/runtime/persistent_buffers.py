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
class _Memory:
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
        self._found: dict[str, _Memory] = {}
        self._awaited: Saved | None = None

    @property
    def specs(self) -> dict[str, tf.TensorSpec]:
        """Shape and dtype of each buffer, by its name in TensorFlow on this worker."""
        return {name: tf.TensorSpec(memory.shape, memory.dtype) for name, memory in self._found.items()}

    @property
    def awaited(self) -> list[str]:
        """Buffers that have a value in the restored checkpoint and that no step has created yet."""
        return [] if self._awaited is None else sorted(self._awaited.keys.keys() - self._found.keys())

    def begin(self, session: tf.compat.v1.Session, initializers: Iterable[tf.Operation]) -> None:
        """Registers buffers that these operations have initialized, and restores those with a checkpointed value."""
        new = {_name_of(op): _Memory(session, op) for op in initializers if op.type == "AssignVariableOp"}
        self._found.update(new)
        if self._awaited is not None:
            self._restore(self._awaited, new)

    def resume(self, saved: Saved) -> None:
        """Restores buffers from a checkpoint; buffers that are missing in it are initialized again.

        A buffer that no step has created yet is restored when it is created.
        """
        self._awaited = saved
        for name, memory in self._found.items():
            if name not in saved.keys:
                memory.session.run(memory.initializer)
        self._restore(saved, self._found)

    def _restore(self, saved: Saved, among: Mapping[str, _Memory]) -> None:
        for name in sorted(saved.keys.keys() & among.keys()):
            memory = among[name]
            with memory.session.graph.as_default(), tf.device(memory.initializer.device):
                (value,) = tf.raw_ops.RestoreV2(
                    prefix=saved.prefix,
                    tensor_names=[saved.keys[name]],
                    shape_and_slices=[""],
                    dtypes=[memory.dtype],
                )
                value.set_shape(memory.shape)
                write = tf.raw_ops.AssignVariableOp(resource=memory.handle, value=value)
            memory.session.run(write)


def _name_of(initializer: tf.Operation) -> str:
    return initializer.inputs[0].op.get_attr("shared_name").decode()
