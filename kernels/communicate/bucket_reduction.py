"""BucketReduction: what the kernels do for a compressor that adds up a bucket."""

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
from autodist.kernels.communicate.communicator import Communicator
from autodist.kernels.communicate.reduce_scatter import AsItIs, ReduceScatter
from autodist.kernels.communicate.subgroup_transfers import SubgroupTransfers
from autodist.kernels.sums import ordered_sum


@dataclass
class BucketReduction:
    """One bucket that is being reduced on this worker, as a compressor sees it (autodist.compressors.Reduction).

    Attributes:
        f: where it is built.
        bucket: what is reduced.
        exchange: between the workers.
        stored_as: by a variable's name, the name under which the session knows it.
        team: by which what goes to all and to owners travels, if teams pass it on.
        initializers: filled with the operations that give memories their first value.
    """

    f: SubgraphBuilder
    bucket: Bucket
    exchange: Communicator
    stored_as: Mapping[str, str]
    team: SubgroupTransfers | None = None
    initializers: dict[str, tf.Operation] = field(default_factory=dict)
    _kept: list[tuple[PersistentBuffer, tf.Tensor]] = field(default_factory=list)

    @property
    def gradients(self) -> Sequence[PendingReduction]:
        return self.bucket.joins

    @property
    def dtype(self) -> tf.DType:
        return self.bucket.dtype

    @property
    def worker(self) -> int:
        return self.exchange.context.worker

    @property
    def workers(self) -> int:
        return self.exchange.context.workers

    @property
    def computing(self) -> Sequence[int]:
        return self.exchange.context.computing

    @property
    def computes(self) -> bool:
        return self.exchange.context.computes

    @property
    def owners(self) -> Sequence[int]:
        if self.team is None:
            return self.computing
        teams = self.team.teams
        return [worker for seat in range(teams.seats) for worker in teams.across(seat)]

    @property
    def number(self) -> int:
        return int(self.exchange.key, 16)

    def number_of(self, gradient: Gradient) -> int:
        return int(digest(key_of([_join(gradient)])), 16)

    @cached_property
    def _total_weight(self) -> tf.Tensor | None:
        """Of all workers. It is known long before the gradients are, so that nothing waits for it."""
        join = self.bucket.joins[0]
        if join.weight is None:
            return None
        weight = self.f.input(join.weight, join.weight_dtype, [])
        if self.team is not None:
            return ordered_sum([part[0] for part in self.team.gather("weight", [weight], to_learners=False)])
        for to in self.computing:  # nobody else adds anything up
            if to != self.worker:
                self.send(to, "weight", [weight])
        return ordered_sum([part[0] for part in self.parts("weight", [weight])])

    def _share(self, value: tf.Tensor) -> tf.Tensor:
        """This worker's share, made of its weighted sum."""
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
        return self.bucket.unpack(whole)

    def ordered_sum(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        return ordered_sum(parts)

    def send(self, to: int, what: str, tensors: Sequence[tf.Tensor]) -> None:
        self.exchange.send(to, what, tensors)

    def receive(self, source: int, what: str, like: Sequence[tf.Tensor | tf.TensorSpec]) -> list[tf.Tensor]:
        return self.exchange.receive(source, what, like)

    def parts(self, what: str, mine: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        return self.exchange.parts(what, mine)

    def all_to_all(self, what: str, mine: Sequence[tf.Tensor | tf.TensorSpec]) -> list[list[tf.Tensor]]:
        return self.exchange.all_to_all(what, mine) if self.team is None else self.team.gather(what, mine)

    def add_by_owners(
        self,
        vectors: Mapping[int, tf.Tensor | tf.TensorSpec],
        code: Code | None = None,
        then: Callable[[tf.Tensor], tf.Tensor] | None = None,
        name: str = "",
    ) -> dict[int, Summed]:
        sums = ReduceScatter(self.exchange, code or AsItIs(), then or _unchanged, name)
        return sums.by_all(vectors) if self.team is None else sums.in_teams(self.team, vectors)

    def memory(self, what: str, initial: tf.Tensor, gradient: Gradient | None = None) -> PersistentBuffer:
        joins = self.bucket.joins if gradient is None else (_join(gradient),)
        # Two models in one process may have variables of equal names, and the session tells these apart.
        owners = ";".join(self.stored_as[j.variable] for j in joins if j.variable is not None)
        made = PersistentBuffer.make(f"compressors/{digest(f'{key_of(joins)} {owners}')}/{what}", initial)
        self.initializers[made.name] = made.initializer
        return made

    def remember(self, memory: compressors.Memory, value: tf.Tensor) -> None:
        self._kept.append((cast(PersistentBuffer, memory), value))

    def finish(self, summed: list[tf.Tensor]) -> None:
        """Writes what is remembered, unless a sum of the step is not finite.

        A gradient that is infinite or not a number makes the sum so on all workers, and a loss scale then skips the
        step. Nothing would ever take such a value out of a memory again.
        """
        if not self._kept:
            return
        is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in summed])
        for memory, value in self._kept:
            self.exchange.effects.append(self.f.name(memory.write_if(is_finite, value)))


def _unchanged(summed: tf.Tensor) -> tf.Tensor:
    return summed


def _join(gradient: Gradient) -> PendingReduction:
    """What a compressor takes for a gradient: it was given it by `BucketReduction.gradients`."""
    return cast(PendingReduction, gradient)


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
