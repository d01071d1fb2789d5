"""BucketReduction: the services that kernels provide to a compressor that sums a bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import tensorflow as tf

from autodist import compressors
from autodist.compressors import Code, Gradient, Summed
from autodist.graph.parts import PendingReduction
from autodist.graph.subgraph import SubgraphBuilder
from autodist.kernels.communicate.buckets import Bucket, digest, key_of
from autodist.kernels.communicate.codec import Codec
from autodist.kernels.communicate.communicator import Communicator
from autodist.kernels.sums import ordered_sum


@dataclass
class BucketReduction:
    """The reduction of one bucket on this worker, as a compressor sees it (`autodist.compressors.Reduction`).

    Attributes:
        f: the builder that adds the nodes.
        bucket: the bucket to reduce.
        exchange: the communicator between workers.
        stored_as: maps a variable's name to its name in the session.
        initializers: filled with the operations that initialize persistent buffers.
    """

    f: SubgraphBuilder
    bucket: Bucket
    exchange: Communicator
    stored_as: Mapping[str, str]
    initializers: dict[str, tf.Operation] = field(default_factory=dict)
    _pending_writes: list[tuple[PersistentBuffer, tf.Tensor]] = field(default_factory=list)

    @property
    def gradients(self) -> Sequence[PendingReduction]:
        return self.bucket.reductions

    @property
    def dtype(self) -> tf.DType:
        return self.bucket.dtype

    @property
    def worker(self) -> int:
        return self.exchange.me

    @property
    def workers(self) -> int:
        return len(self.bucket.group.everyone)

    @property
    def computing(self) -> Sequence[int]:
        return self.bucket.group.workers

    @property
    def computes(self) -> bool:
        return self.exchange.contributes

    @property
    def owners(self) -> Sequence[int]:
        return self.exchange.owners

    @property
    def number(self) -> int:
        return int(self.exchange.key, 16)

    def number_of(self, gradient: Gradient) -> int:
        return int(digest(key_of([_join(gradient)])), 16)

    @cached_property
    def _total_weight(self) -> tf.Tensor | None:
        """The sum of all workers' weights. It is available long before the gradients, so that nothing waits for it."""
        pending = self.bucket.reductions[0]
        if pending.weight is None:
            return None
        weight = self.f.input(pending.weight, pending.weight_dtype, [])
        parts = self.exchange.all_gather("weight", [weight], to_receivers=False)  # receivers sum nothing
        return ordered_sum([part[0] for part in parts])

    def _share(self, value: tf.Tensor) -> tf.Tensor:
        """Returns this worker's contribution to the mean: its weighted sum divided by the total weight."""
        total = self._total_weight
        return value if total is None else tf.math.divide_no_nan(value, tf.cast(total, value.dtype))

    def share_of(self, gradient: Gradient, dtype: tf.DType | None = None) -> tf.Tensor:
        value = self.f.input(_join(gradient).local[0], gradient.dtype, gradient.shape)
        return self._share(tf.cast(value, dtype or gradient.dtype))

    def pack(self) -> tf.Tensor:
        return self._share(self.bucket.pack(self.f))

    def cut(self, count: int) -> list[int]:
        return self.bucket.cut(count)

    def unpack(self, whole: tf.Tensor) -> list[tf.Tensor]:
        return self.bucket.unpack(self.f, whole)

    def ordered_sum(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        return ordered_sum(parts)

    def send(self, to: int, what: str, tensors: Sequence[tf.Tensor]) -> None:
        self.exchange.send(to, what, tensors)

    def receive(self, source: int, what: str, like: Sequence[tf.Tensor | tf.TensorSpec]) -> list[tf.Tensor]:
        return self.exchange.receive(source, what, like)

    def parts(self, what: str, mine: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        return self.exchange.collect(what, mine)

    def all_to_all(self, what: str, mine: Sequence[tf.Tensor | tf.TensorSpec]) -> list[list[tf.Tensor]]:
        return self.exchange.all_gather(what, mine)

    def add_by_owners(
        self,
        vectors: Mapping[int, tf.Tensor | tf.TensorSpec],
        code: Code | None = None,
        then: Callable[[tf.Tensor], tf.Tensor] | None = None,
        name: str = "",
    ) -> dict[int, Summed]:
        return self.exchange.reduce_scatter(vectors, Codec(code, then), name)

    def memory(self, what: str, initial: tf.Tensor, gradient: Gradient | None = None) -> PersistentBuffer:
        reductions = self.bucket.reductions if gradient is None else (_join(gradient),)
        # Two models in one process may have variables of equal names; their names in the session differ.
        owners = ";".join(self.stored_as[j.variable] for j in reductions if j.variable is not None)
        made = PersistentBuffer.make(f"compressors/{digest(f'{key_of(reductions)} {owners}')}/{what}", initial)
        self.initializers[made.name] = made.initializer
        return made

    def remember(self, memory: compressors.Memory, value: tf.Tensor) -> None:
        self._pending_writes.append((cast(PersistentBuffer, memory), value))

    def finish(self, summed: list[tf.Tensor]) -> None:
        """Writes the new values of persistent buffers, unless a sum of the step is not finite.

        An infinite or NaN gradient makes the sum non-finite on all workers, and a loss scale then skips the step. A
        persistent buffer would keep such a value forever.
        """
        if not self._pending_writes:
            return
        is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in summed])
        for memory, value in self._pending_writes:
            self.exchange.effects.append(self.f.name(memory.write_if(is_finite, value)))


def _join(gradient: Gradient) -> PendingReduction:
    """Casts a gradient of `BucketReduction.gradients`, as a compressor returns it, to its type."""
    return cast(PendingReduction, gradient)


@dataclass(frozen=True)
class PersistentBuffer:
    """A local variable that is read and written once per step, or outer step.

    Attributes:
        name: its name in the session of this worker.
        value: the value at the beginning of the step.
        initializer: the operation that initializes it.
    """

    name: str
    value: tf.Tensor
    initializer: tf.Operation
    _handle: tf.Tensor

    @classmethod
    def make(cls, name: str, initial: tf.Tensor) -> PersistentBuffer:
        """Adds the variable to the graph that is being built."""
        handle = tf.raw_ops.VarHandleOp(dtype=initial.dtype, shape=initial.shape, shared_name=name)
        initializer = tf.raw_ops.AssignVariableOp(resource=handle, value=initial)
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=initial.dtype)
        value.set_shape(initial.shape)
        return cls(name, value, initializer, handle)

    def write(self, value: tf.Tensor) -> tf.Operation:
        """Writes `value`."""
        return tf.raw_ops.AssignVariableOp(resource=self._handle, value=value)

    def add(self, value: tf.Tensor) -> tf.Operation:
        """Adds `value`."""
        return tf.raw_ops.AssignAddVariableOp(resource=self._handle, value=value)

    def write_if(self, condition: tf.Tensor, value: tf.Tensor) -> tf.Operation:
        """Writes `value` if `condition` (a scalar) holds; otherwise keeps the current value."""
        # Select accepts a scalar condition; tf.where would broadcast it to every element.
        kept = tf.raw_ops.Select(condition=condition, x=value, y=self.value)
        return self.write(kept)
