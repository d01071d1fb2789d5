"""Reduction: the operations that kernels provide to a compressor to sum gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import tensorflow as tf


class Gradient(Protocol):
    """One dense gradient under reduction."""

    @property
    def dtype(self) -> tf.DType: ...

    @property
    def shape(self) -> tf.TensorShape:
        """Fully known: rank and each length."""


class Memory(Protocol):
    """A variable in which this worker keeps state between steps."""

    @property
    def value(self) -> tf.Tensor:
        """Its value at the start of the step, with the shape and dtype of its `initial`."""


class Code(Protocol):
    """Encodes a vector for another worker, and decodes it."""

    def encode(self, vector: tf.Tensor) -> list[tf.Tensor]:
        """Returns the tensors to send in place of a vector of rank 1."""

    def decode(self, sent: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
        """Returns the vector of rank 1 and dtype `dtype` that the recipient decodes from the result of `encode`."""

    def specs(self, length: int, dtype: tf.DType) -> list[tf.TensorSpec]:
        """Returns the specs, with fully known shapes, of the result of `encode` for a vector of `length` elements."""


@dataclass(frozen=True)
class Summed:
    """A vector that an owner has summed.

    Attributes:
        whole: the sum after decoding, a vector with the same bits on all workers.
        lost: the encoding error of this worker's contribution, a vector of the same length; None if it sent nothing.
    """

    whole: tf.Tensor
    lost: tf.Tensor | None = None


class Reduction(Protocol):
    """The sum of some gradients of one dtype over the workers, from the view of one worker.

    A worker's *share* is its contribution to the joint gradient: its weighted sum, divided by the weight of all
    workers. Shares therefore only need to be added. A worker without examples has a share of zeros. A residual from
    earlier steps counts the same in every step, whatever its number of examples. No gradient leaves the range of a
    short dtype by multiplication with a number of examples.
    """

    @property
    def gradients(self) -> Sequence[Gradient]: ...

    @property
    def dtype(self) -> tf.DType:
        """The dtype of all the gradients."""

    @property
    def worker(self) -> int:
        """Index of this worker."""

    @property
    def workers(self) -> int:
        """Number of workers, including those without a share."""

    @property
    def computing(self) -> Sequence[int]:
        """Indices of the workers that have a share, in order."""

    @property
    def computes(self) -> bool:
        """True if this worker has a share."""

    @property
    def owners(self) -> Sequence[int]:
        """Indices of the workers that may own vectors in `add_by_owners`."""

    @property
    def number(self) -> int:
        """A number derived from the gradients, the same on all workers and in every run."""

    def number_of(self, gradient: Gradient) -> int:
        """Returns the equivalent of `number` for one gradient."""

    # -- values

    def share_of(self, gradient: Gradient, dtype: tf.DType | None = None) -> tf.Tensor:
        """Returns this worker's share of one gradient, in the gradient's shape and, by default, its dtype."""

    def pack(self) -> tf.Tensor:
        """Returns this worker's share of all gradients as one vector; zeros between them align each."""

    def cut(self, count: int) -> list[int]:
        """Returns the lengths of `count` pieces of the vector of `pack`; some may be 0."""

    def unpack(self, whole: tf.Tensor) -> list[tf.Tensor]:
        """Reverses `pack`: returns a tensor of each gradient's shape, in the order of `gradients`."""

    def ordered_sum(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the sum of tensors of one shape, added in order, so that its bits are the same everywhere."""

    # -- between the workers: both sides use the same name for a message

    def send(self, to: int, what: str, tensors: Sequence[tf.Tensor]) -> None:
        """Sends tensors to a worker, which must receive them."""

    def receive(self, source: int, what: str, like: Sequence[tf.Tensor | tf.TensorSpec]) -> list[tf.Tensor]:
        """Returns the tensors that a worker sends here by `send`, with the dtypes and shapes of `like`."""

    def parts(self, what: str, mine: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        """Returns the tensors that each of `computing` sends here by `send`, in order; `mine` is this worker's own."""

    def all_to_all(self, what: str, mine: Sequence[tf.Tensor | tf.TensorSpec]) -> list[list[tf.Tensor]]:
        """Returns the tensors that each of `computing` sends to all, in order, including this worker's `mine`.

        A worker without a share passes specs of the incoming tensors.
        """

    def add_by_owners(
        self,
        vectors: Mapping[int, tf.Tensor | tf.TensorSpec],
        code: Code | None = None,
        then: Callable[[tf.Tensor], tf.Tensor] | None = None,
        name: str = "",
    ) -> dict[int, Summed]:
        """Returns the sums of vectors with owners; each owner sums its vector and broadcasts the result.

        With many workers, subgroups sum first, so that a worker communicates with few others; `send` communicates with
        all of them.

        Args:
            vectors: maps owners, which are in `owners`, to this worker's contribution of rank 1; a worker without a
                share passes specs.
            code: encodes them on every hop; None: they are sent unencoded.
            then: called by the owner with the sum; returns a vector of the same length that is broadcast instead.
            name: distinguishes calls for the same gradients.
        """

    # -- state between steps

    def memory(self, what: str, initial: tf.Tensor, gradient: Gradient | None = None) -> Memory:
        """Returns a variable that this worker keeps between steps; it is saved in checkpoints.

        Args:
            what: name among the variables of the same gradient.
            initial: its value before the first step.
            gradient: the gradient that it belongs to; None: all gradients.
        """

    def remember(self, memory: Memory, value: tf.Tensor) -> None:
        """Assigns `value` to a memory for the next step, unless this step is dropped because a sum is not finite."""
