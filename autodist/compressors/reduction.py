"""Reduction: what a compressor is given to add gradients up with; the kernels make it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import tensorflow as tf


class Gradient(Protocol):
    """One dense gradient that is being added up."""

    @property
    def dtype(self) -> tf.DType: ...

    @property
    def shape(self) -> tf.TensorShape:
        """Fully known."""


class Memory(Protocol):
    """One variable, which this worker keeps from step to step."""

    @property
    def value(self) -> tf.Tensor:
        """That it holds when the step begins."""


class Reduction(Protocol):
    """Some gradients of one type that are added up over the workers, as one worker does it.

    A worker's *share* is what it adds to the joint gradient: its weighted sum, divided by the weight of all workers.
    The shares need only be added; a worker without examples has a share of zeros, and what it still owes from earlier
    steps is worth the same in every step, however many examples that has. Nor can a gradient that is in the range of
    a short type leave it because it was multiplied by a number of examples.
    """

    @property
    def gradients(self) -> Sequence[Gradient]: ...

    @property
    def dtype(self) -> tf.DType:
        """Of all the gradients."""

    @property
    def worker(self) -> int:
        """Index of this worker."""

    @property
    def workers(self) -> int:
        """How many there are, those included that have no share."""

    @property
    def computing(self) -> Sequence[int]:
        """Indices of the workers that have a share, in their order."""

    @property
    def computes(self) -> bool:
        """Whether this worker has a share."""

    @property
    def number(self) -> int:
        """Made of what the gradients are, the same on all workers and in every run."""

    def number_of(self, gradient: Gradient) -> int:
        """The same of one gradient."""

    # -- values

    def share_of(self, gradient: Gradient, dtype: tf.DType | None = None) -> tf.Tensor:
        """This worker's share of one gradient, in the gradient's own type by default."""

    def pack(self) -> tf.Tensor:
        """This worker's share of all gradients, as one vector with zeros in between."""

    def cut(self, count: int) -> list[int]:
        """Lengths of so many pieces, some of which may be empty, that together are the vector of `pack`."""

    def unpack(self, whole: tf.Tensor) -> list[tf.Tensor]:
        """The tensors of which a vector is made as `pack` makes it."""

    def ordered_sum(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """The sum of tensors of one shape, added in their order, so that its bits are the same everywhere."""

    # -- between the workers: what is sent has a name, the same on both sides

    def send(self, to: int, what: str, tensors: Sequence[tf.Tensor]) -> None:
        """Sends tensors to a worker, which has to receive them."""

    def receive(self, source: int, what: str, like: Sequence[tf.Tensor | tf.TensorSpec]) -> list[tf.Tensor]:
        """What a worker sends here; `like` has the dtypes and shapes that come."""

    def parts(self, what: str, mine: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        """What each worker that has a share sends here, in the order of the workers; `mine` in this one's place."""

    def all_to_all(self, what: str, mine: Sequence[tf.Tensor | tf.TensorSpec]) -> list[list[tf.Tensor]]:
        """What every worker that has a share sends to all, in the order of the workers; its own part among them.

        A worker without one says by specs what comes.
        """

    # -- from step to step

    def memory(self, what: str, initial: tf.Tensor, gradient: Gradient | None = None) -> Memory:
        """What this worker remembers from the last step.

        Args:
            what: it is for.
            initial: what it holds at first.
            gradient: whose it is; None: all gradients'.
        """

    def remember(self, memory: Memory, value: tf.Tensor) -> None:
        """Lets a memory hold `value` in the next step, unless this one comes to nothing since a sum is not finite."""
