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
        """Fully known: rank and each length."""


class Memory(Protocol):
    """One variable, which this worker keeps from step to step."""

    @property
    def value(self) -> tf.Tensor:
        """What it holds when the step begins; shape and dtype are those of its `initial`."""


class Code(Protocol):
    """Makes of a vector what travels to another worker, and back."""

    def encode(self, vector: tf.Tensor) -> list[tf.Tensor]:
        """The tensors that travel in place of a vector of rank 1."""

    def decode(self, sent: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
        """The vector of rank 1 and type `dtype` that the reader makes of what `encode` gave."""

    def specs(self, length: int, dtype: tf.DType) -> list[tf.TensorSpec]:
        """Shapes, fully known, and dtypes of what `encode` gives for a vector of `length` elements."""


@dataclass(frozen=True)
class Summed:
    """A vector that an owner has added up.

    Attributes:
        whole: the sum as it was decoded, a vector with the same bits on all workers.
        lost: what encoding took from this worker's part, a vector of the same length; None where it has sent nothing.
    """

    whole: tf.Tensor
    lost: tf.Tensor | None = None


class Reduction(Protocol):
    """Some gradients of one type that are added up over the workers, as one worker does it.

    A worker's *share* is what it adds to the joint gradient: its weighted sum, divided by the weight of all workers. So
    shares need only be added. A worker without examples has a share of zeros; what a worker still owes from earlier
    steps counts the same in every step, however many examples that has; and no gradient leaves the range of a short
    type because it was multiplied by a number of examples.
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
        """How many workers there are, those without a share included."""

    @property
    def computing(self) -> Sequence[int]:
        """Indices of the workers that have a share, in their order."""

    @property
    def computes(self) -> bool:
        """Whether this worker has a share."""

    @property
    def owners(self) -> Sequence[int]:
        """Indices of the workers that may own vectors in `add_by_owners`."""

    @property
    def number(self) -> int:
        """Made of what the gradients are, the same on all workers and in every run."""

    def number_of(self, gradient: Gradient) -> int:
        """As `number`, for one gradient."""

    # -- values

    def share_of(self, gradient: Gradient, dtype: tf.DType | None = None) -> tf.Tensor:
        """This worker's share of one gradient, of the gradient's shape, in its own dtype by default."""

    def pack(self) -> tf.Tensor:
        """This worker's share of all gradients, end to end as one vector; zeros between them align each."""

    def cut(self, count: int) -> list[int]:
        """Lengths of `count` pieces, some maybe 0, that together make up the vector of `pack`."""

    def unpack(self, whole: tf.Tensor) -> list[tf.Tensor]:
        """The reverse of `pack`: a tensor of each gradient's shape, in the order of `gradients`."""

    def ordered_sum(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """The sum of tensors of one shape, added in their order, so that its bits are the same everywhere."""

    # -- between the workers: what is sent has a name, the same on both sides

    def send(self, to: int, what: str, tensors: Sequence[tf.Tensor]) -> None:
        """Sends tensors to a worker, which has to receive them."""

    def receive(self, source: int, what: str, like: Sequence[tf.Tensor | tf.TensorSpec]) -> list[tf.Tensor]:
        """What a worker sends here by `send`; `like` gives the dtypes and shapes that come."""

    def parts(self, what: str, mine: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        """What each of `computing` sends here by `send`, in their order; `mine` stands in this worker's place."""

    def all_to_all(self, what: str, mine: Sequence[tf.Tensor | tf.TensorSpec]) -> list[list[tf.Tensor]]:
        """What each of `computing` sends to all, in their order, this worker's `mine` among them.

        A worker without a share gives specs of what comes in place of tensors.
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
            vectors: by owner, which is one of `owners`, this worker's part, of rank 1; a worker without a share gives
                specs.
            code: encodes them on every hop; None: they travel as they are.
            then: called by the owner with the sum, gives a vector of the same length that is told in its place.
            name: tells calls apart that are made for the same gradients.
        """

    # -- from step to step

    def memory(self, what: str, initial: tf.Tensor, gradient: Gradient | None = None) -> Memory:
        """A variable that this worker keeps from step to step; a checkpoint has it, too.

        Args:
            what: names it among those of the same gradient.
            initial: its value before the first step.
            gradient: whose it is; None: all gradients'.
        """

    def remember(self, memory: Memory, value: tf.Tensor) -> None:
        """Lets a memory hold `value` in the next step, unless this one comes to nothing since a sum is not finite."""
