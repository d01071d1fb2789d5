"""A row of the table: ops of which the same is known."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Trait(enum.Flag):
    """What an op may be; an op may be several."""

    # -- what it makes of numbers --

    ELEMENTWISE = enum.auto()
    """Its one output has, at each place, a function of what its operands have there, operands being broadcast.

    An op that stops the step where a value is bad is none of these: it looks at every row.
    """
    ZERO_TO_ZERO = enum.auto()
    """It has one operand, and makes zero of zero."""
    EXACT = enum.auto()
    """Its results are exact, or rounded to the nearest number, whoever computes them.

    XLA's powers and exponentials differ from TensorFlow's in their last bit, which Adam's `1 - beta_2 ** t` makes a
    thousand times as large.
    """
    ADDITION = enum.auto()
    PRODUCT = enum.auto()
    QUOTIENT = enum.auto()
    WHOLE_QUOTIENT = enum.auto()
    """How often one operand goes into another."""
    COMPARISON = enum.auto()
    LOGIC = enum.auto()
    MEASURES = enum.auto()
    """It grows with the batch as its first operand does: a mean, a choice of elements."""
    LEVELS = enum.auto()
    """It grows with the batch as its operands do, all of which grow alike: a sum of tensors, a choice between them."""

    EXTREME = enum.auto()
    """The largest or the smallest of the elements along some axes."""

    # -- what it leaves as it is --

    SAME = enum.auto()
    """Its output is its first input."""
    RESHAPES = enum.auto()
    """The same elements in the same order, in another shape or in one that is checked."""
    CASTS = enum.auto()
    """The same numbers in another type."""
    REPEATS = enum.auto()
    """The elements of its first input, some of them several times."""
    SLICES = enum.auto()
    OF_SCALARS = enum.auto()
    """A table with a scalar for each key."""
    PICKS = enum.auto()
    """It takes some elements by where they stand, which an input says."""
    BY_SHAPES = enum.auto()
    """Its outputs are the same whatever the values of its operands."""
    LENGTHS = enum.auto()
    """How long the axes of its inputs are, each input by itself, or how many elements there are."""
    OF_SHAPES = enum.auto()
    """It makes the elements of a shape, which tell of the batch although all replicas may have the same."""
    ZEROS = enum.auto()
    """It gives zeros alone, or a list of what is read as zeros until it is written."""
    UNIQUE = enum.auto()
    """Each index once, and for each that comes in which of these it is."""
    UNIQUE_COUNTED = enum.auto()
    """As UNIQUE, and how often each came."""
    SEGMENT_ROWS = enum.auto()
    """Rows of a gradient, and the index of each, none of which comes twice."""

    # -- what it is for --

    CONVOLUTION = enum.auto()
    """A convolution, or the gradient of one."""
    NORMALISES = enum.auto()
    """It scales examples by moments of all of them, which are its further outputs."""
    LIST = enum.auto()
    """It makes, reads or writes a list of tensors."""
    TELLS = enum.auto()
    """It says something, or stops the step, and gives nothing."""
    LOOKS = enum.auto()
    """It says something, or stops the step, and passes its input on."""
    NOT_IN_XLA = enum.auto()
    """XLA could compile it, and it is to stay outside."""

    # -- state --

    SOURCE = enum.auto()
    """It takes nothing, and waits for nothing."""
    FED = enum.auto()
    """A placeholder."""
    READ = enum.auto()
    """It reads a variable, and does nothing else with it."""
    ASSIGNMENT = enum.auto()
    """It gives a variable, or adds to it, a value of its own shape."""
    QUERY = enum.auto()
    """It asks for static facts of a variable, and orders nothing."""
    REFERENCE = enum.auto()
    """A variable of TensorFlow 1 that is no resource."""
    TABLE = enum.auto()
    """A lookup table."""
    TABLE_READ = enum.auto()
    TABLE_WRITE = enum.auto()
    ITERATOR = enum.auto()
    ITERATOR_GET = enum.auto()
    QUEUE_GET = enum.auto()
    """It takes data from a queue, or from what may be at its end."""

    # -- chance --

    SEEDED = enum.auto()
    """It is stateful, and draws from the seeds in its attributes."""
    GENERATOR = enum.auto()
    """It draws from a variable, which it advances."""
    BY_KEY = enum.auto()
    """It draws what a seed or a key among its inputs says, and by the same one always the same."""
    KEY = enum.auto()
    """It makes of a seed the key to draw by, or says which algorithm draws."""
    SHUFFLES = enum.auto()
    """It puts what lies along the first axis in an order that it draws."""

    # -- control flow --

    CALL = enum.auto()
    BRANCH = enum.auto()
    LOOP = enum.auto()
    ENTER = enum.auto()
    SWITCH = enum.auto()
    MERGE = enum.auto()
    BACK = enum.auto()
    """It brings a value to the next turn of a loop of TensorFlow 1."""
    EXIT = enum.auto()
    STACK = enum.auto()
    """It makes the place where a loop of TensorFlow 1 keeps what each turn gives, or what its gradient needs."""


@dataclass(frozen=True)
class LinearIn:
    """The operands in which an op is linear, by position; what it does with the others does not matter.

    Attributes:
        operands: the positions, from behind where negative; None: all.
        apart: whether it is linear in each while the others stay what they are, as a product is, or else in all of them
            together, as a sum is.
        but: positions that are left out of `operands`.
        half: whether it is those of the second half, before which stand as many indices.
    """

    operands: tuple[int, ...] | None
    apart: bool = False
    but: tuple[int, ...] = ()
    half: bool = False

    def positions(self, count: int) -> list[int]:
        """Those of `count` operands."""
        if self.half:
            return list(range(count // 2, count))
        chosen = range(count) if self.operands is None else self.operands
        left_out = {k % count for k in self.but if count}
        return [k for k in dict.fromkeys(k % count for k in chosen if -count <= k < count) if k not in left_out]


def linear(*operands: int, but: tuple[int, ...] = ()) -> LinearIn:
    """Linear in some operands together; in all, where none is named."""
    return LinearIn(operands or None, but=but)


def product(*operands: int) -> LinearIn:
    """Linear in each of some operands; of all, where none is named."""
    return LinearIn(operands or None, apart=True)


SECOND_HALF = LinearIn(None, half=True)


NOTHING = Trait(0)


@dataclass(frozen=True)
class Row:
    """Ops of which the same is known.

    Attributes:
        names: with spaces between them, as long lists of them read best.
        traits: what they are.
        linear: in which operands they are linear by themselves; None: nothing is said.
        filling: the number that all elements of what they make are; None: there are others, too.
    """

    names: str
    traits: Trait = NOTHING
    linear: LinearIn | None = None
    filling: int | None = None
