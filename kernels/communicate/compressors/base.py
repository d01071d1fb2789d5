"""Compression: a way to add up a bucket of gradients over the workers that sends fewer bytes and loses something."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import tensorflow as tf

from autodist.graph.fragment import Fragment
from autodist.graph.parts import Join
from autodist.kernels.communicate.buckets import Bucket, digest, key_of
from autodist.kernels.communicate.compressors.memory import Memory
from autodist.kernels.communicate.exchange import Exchange
from autodist.kernels.sums import ordered_sum


class Compression(ABC):
    """Adds up a bucket over the workers; a frozen dataclass, whose fields are its options.

    Every worker ends with the same bits: a sum that several of them need is made by one and sent, or made by each of
    the same parts in the order of the workers. Sums are made in the gradient's own type.
    """

    @abstractmethod
    def saves_bytes(self, join: Join) -> bool:
        """Whether less travels than without it; what it does not make smaller travels as it is."""

    @abstractmethod
    def add_up(self, reduction: BucketReduction) -> list[tf.Tensor]:
        """What the workers' shares of a bucket add up to, in the order of its joins.

        A worker without replicas has no share, sends nothing and remembers nothing; it only learns the sums.
        """


@dataclass
class BucketReduction:
    """One bucket that is being reduced on this worker.

    A worker's *share* is what it adds to the joint gradient: its weighted sum, divided by the weight of all workers.
    The shares need only be added; a worker without examples has a share of zeros, and what it still owes from earlier
    steps is worth the same in every step, however many examples that has. Nor can a gradient that is in the range of
    a short type leave it because it was multiplied by a number of examples.

    Attributes:
        f: where it is built.
        bucket: what is reduced.
        exchange: between the workers.
        stored_as: by a variable's name, the name under which the session knows it.
        initializers: filled with the operations that give memories their first value.
    """

    f: Fragment
    bucket: Bucket
    exchange: Exchange
    stored_as: Mapping[str, str]
    initializers: dict[str, tf.Operation] = field(default_factory=dict)
    _kept: list[tuple[Memory, tf.Tensor]] = field(default_factory=list)

    @cached_property
    def _total_weight(self) -> tf.Tensor | None:
        """Of all workers. It is known long before the gradients are, so that nothing waits for it."""
        join = self.bucket.joins[0]
        if join.weight is None:
            return None
        weight = self.f.input(join.weight, join.weight_dtype, [])
        context = self.exchange.context
        for to in context.computing:
            if to != context.worker:
                self.exchange.send(to, "weight", [weight])
        return ordered_sum([part[0] for part in self.exchange.parts("weight", [weight])])

    def share(self, value: tf.Tensor) -> tf.Tensor:
        """This worker's share, of its weighted sum."""
        total = self._total_weight
        return value if total is None else tf.math.divide_no_nan(value, tf.cast(total, value.dtype))

    def share_of(self, join: Join, dtype: tf.DType | None = None) -> tf.Tensor:
        """This worker's share of one join, in the join's own type by default."""
        return self.share(tf.cast(self.f.input(join.local[0], join.dtype, join.shape), dtype or join.dtype))

    def memory(self, what: str, initial: tf.Tensor, join: Join | None = None) -> Memory:
        """What this worker remembers from the last step.

        Args:
            what: it is for.
            initial: what it holds at first.
            join: whose it is; None: the whole bucket's.
        """
        joins = self.bucket.joins if join is None else (join,)
        # Two models in one process may have variables of equal names, and the session tells these apart.
        owners = ";".join(self.stored_as[j.variable] for j in joins if j.variable is not None)
        made = Memory.make(f"compressors/{digest(f'{key_of(joins)} {owners}')}/{what}", initial)
        self.initializers[made.name] = made.initializer
        return made

    def remember(self, memory: Memory, value: tf.Tensor) -> None:
        """Lets a memory hold `value` in the next step, if this one is kept."""
        self._kept.append((memory, value))

    def finish(self, summed: list[tf.Tensor]) -> None:
        """Writes what is remembered, unless the step came to nothing.

        A gradient that is infinite or not a number makes the sum so on all workers, and a loss scale then skips the
        step. Nothing would ever take such a value out of a memory again.
        """
        if not self._kept:
            return
        is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in summed])
        for memory, value in self._kept:
            self.exchange.effects.append(memory.write_if(is_finite, value))
