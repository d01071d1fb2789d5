"""Reduction: what a compressor is given to add gradients up with; the kernels make it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


class Code(Protocol):
    """What a vector becomes for its way to another worker."""

    def encode(self, vector: tf.Tensor) -> list[tf.Tensor]:
        """What travels in its place."""

    def decode(self, sent: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
        """What is read of it, a vector of the given type."""

    def specs(self, length: int, dtype: tf.DType) -> list[tf.TensorSpec]:
        """What `encode` makes of a vector of so many elements; the shapes are fully known."""


@dataclass(frozen=True)
class Summed:
    """A vector that an owner has added up.

    Attributes:
        whole: what all workers have of it, with the same bits.
        lost: what the code took from what this worker has sent of it; None where it has sent nothing.
    """

    whole: tf.Tensor
    lost: tf.Tensor | None = None


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
    def owners(self) -> Sequence[int]:
        """Indices of the workers that may own what is added up by `add_by_owners`, and to whom it is dealt out."""

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

    def add_by_owners(
        self,
        vectors: Mapping[int, tf.Tensor | tf.TensorSpec],
        code: Code | None = None,
        then: Callable[[tf.Tensor], tf.Tensor] | None = None,
        name: str = "",
    ) -> dict[int, Summed]:
        """The sums of vectors that each have an owner, who adds them up and tells all.

        On many workers they are added up within teams first, so that a worker has to do with few others; whoever uses
        `send` has to do with all of them.

        Args:
            vectors: by owner, which is one of `owners`; a worker without a share says by specs what they look like.
            code: what they travel as on every hop; None: as they are.
            then: what the owner makes of a sum, of the same length, before it tells it.
            name: tells the sums apart that are made of the same gradients.
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
