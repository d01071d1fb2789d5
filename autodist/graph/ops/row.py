"""Row: one row of the op table, for ops with the same properties."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from autodist.graph.ops.factor_rule import FactorFunction
from autodist.graph.ops.moves import elementwise


class Trait(enum.Flag):
    """Properties of an op; an op may have several."""

    # -- arithmetic --

    ELEMENTWISE = enum.auto()
    """Its only output is, element by element, a function of its broadcast operands.

    An op that stops the step at a bad value does not count: it looks at every row.
    """
    ZERO_TO_ZERO = enum.auto()
    """It has one operand and maps zero to zero."""
    EXACT = enum.auto()
    """Its results are exact or correctly rounded, on every device and in XLA.

    XLA's powers and exponentials differ from TensorFlow's in their last bit; Adam's `1 - beta_2 ** t` multiplies the
    difference by a thousand.
    """
    ADDITION = enum.auto()
    SUM = enum.auto()
    """The sum of its operands, or their difference."""
    PRODUCT = enum.auto()
    QUOTIENT = enum.auto()
    WHOLE_QUOTIENT = enum.auto()
    """Integer quotient of two operands."""
    COMPARISON = enum.auto()
    LOGIC = enum.auto()
    MEASURES = enum.auto()
    """Its batch degree is that of its first operand: a mean, a selection of elements."""
    LEVELS = enum.auto()
    """Its batch degree is that of its operands, all of equal degree: a sum of tensors, a choice between them."""

    SELECTS = enum.auto()
    """Each element is that of one of the last two operands, by the condition in the first."""
    COMBINES = enum.auto()
    """Its elements are sums of elements of its first operand, each with a constant coefficient."""

    REDUCES = enum.auto()
    """Reduces elements along some axes, so that results for parts of them determine the result."""
    EXTREME = enum.auto()
    """Largest or smallest element along some axes."""

    # -- outputs made of input elements --

    IDENTITY = enum.auto()
    """Its output is its first input."""
    RESHAPES = enum.auto()
    """The same elements in the same order, in another shape or with a checked shape."""
    CASTS = enum.auto()
    """The same numbers in another dtype."""
    COPIES = enum.auto()
    """Returns elements of its inputs as they are or cast, which the column `linear` does not express."""
    REPEATS = enum.auto()
    """The elements of its first input, some of them repeated."""
    SLICES = enum.auto()
    OF_SCALARS = enum.auto()
    """A table with a scalar for each key."""
    PICKS = enum.auto()
    """Selects elements by positions from an input."""
    BY_SHAPES = enum.auto()
    """Its outputs depend on the shapes of its operands only."""
    LENGTHS = enum.auto()
    """The lengths of the axes of each input, or its number of elements."""
    OF_SHAPES = enum.auto()
    """Computes elements of a shape; these depend on the batch even if they are equal on all replicas."""
    ZEROS = enum.auto()
    """Returns zeros, or a list whose elements are zeros until they are written."""
    UNIQUE = enum.auto()
    """Returns each distinct index once, and for each input its position among them."""
    UNIQUE_COUNTED = enum.auto()
    """As UNIQUE, with the count of each index."""
    SEGMENT_ROWS = enum.auto()
    """Rows of a gradient with distinct indices."""

    # -- purpose --

    CONVOLUTION = enum.auto()
    """A convolution, or the gradient of one."""
    NORMALISES = enum.auto()
    """Normalizes examples with moments of all of them; the moments are its further outputs."""
    LIST = enum.auto()
    """Creates, reads or writes a list of tensors."""
    PRINTS = enum.auto()
    """Prints something or stops the step; has no output."""
    CHECKS = enum.auto()
    """Prints something or stops the step; returns its input."""
    NOT_IN_XLA = enum.auto()
    """XLA could compile it, but it must stay outside."""

    # -- state --

    SOURCE = enum.auto()
    """Has no inputs and no control inputs."""
    FED = enum.auto()
    """A placeholder."""
    READ = enum.auto()
    """Reads a variable and does nothing else with it."""
    ASSIGNMENT = enum.auto()
    """Assigns or adds a value of the variable's shape to a variable."""
    QUERY = enum.auto()
    """Reads static properties of a variable; imposes no order."""
    REFERENCE = enum.auto()
    """A TensorFlow 1 variable that is not a resource."""
    TABLE = enum.auto()
    """A lookup table."""
    TABLE_READ = enum.auto()
    TABLE_WRITE = enum.auto()
    ITERATOR = enum.auto()
    ITERATOR_GET = enum.auto()
    QUEUE_GET = enum.auto()
    """Takes data from a queue, or from an iterator that may be exhausted."""
    ACCUMULATOR = enum.auto()
    """Keeps the sum of gradients of several steps."""

    # -- random numbers --

    SEEDED = enum.auto()
    """Stateful; draws with the seeds in its attributes."""
    GENERATOR = enum.auto()
    """Draws from a state variable, which it advances."""
    BY_KEY = enum.auto()
    """Draws deterministically with a seed or key among its inputs."""
    KEY = enum.auto()
    """Derives from a seed the key to draw with, or returns the algorithm."""
    SHUFFLES = enum.auto()
    """Shuffles its input along the first axis."""

    # -- control flow --

    CALL = enum.auto()
    BRANCH = enum.auto()
    LOOP = enum.auto()
    ENTER = enum.auto()
    SWITCH = enum.auto()
    MERGE = enum.auto()
    BACK = enum.auto()
    """Passes a value to the next iteration of a TensorFlow 1 loop."""
    EXIT = enum.auto()
    STACK = enum.auto()
    """Creates the stack for the results of each iteration of a TensorFlow 1 loop, or for its gradient's values."""


@dataclass(frozen=True)
class LinearIn:
    """Positions of the operands in which an op is linear; its dependence on the others does not matter.

    Attributes:
        operands: the positions, negative ones from the end; None: all.
        apart: True if it is linear in each operand while the others are constant, like a product; False if it is linear
            in all of them together, like a sum.
        but: positions excluded from `operands`.
        half: True for the second half of the operands, which follows as many indices.
    """

    operands: tuple[int, ...] | None
    apart: bool = False
    but: tuple[int, ...] = ()
    half: bool = False

    def positions(self, count: int) -> list[int]:
        """Returns the positions for `count` operands."""
        if self.half:
            return list(range(count // 2, count))
        chosen = range(count) if self.operands is None else self.operands
        left_out = {k % count for k in self.but if count}
        return [k for k in dict.fromkeys(k % count for k in chosen if -count <= k < count) if k not in left_out]


def linear(*operands: int, but: tuple[int, ...] = ()) -> LinearIn:
    """Returns linearity in some operands together; in all if none is listed."""
    return LinearIn(operands or None, but=but)


def product(*operands: int) -> LinearIn:
    """Returns linearity in each of some operands; in each of all if none is listed."""
    return LinearIn(operands or None, apart=True)


SECOND_HALF = LinearIn(None, half=True)


NOTHING = Trait(0)


@dataclass(frozen=True)
class Row:
    """Ops with the same properties.

    Attributes:
        names: the ops, separated by spaces for readability.
        traits: their properties.
        linear: the operands in which they are linear; None: unspecified.
        filling: the number that all elements of the output equal; None: not constant.
        factors: the factor rule, as a notation or as a function of the node (see `factor_rule`); elementwise ops need
            none.
    """

    names: str
    traits: Trait = NOTHING
    linear: LinearIn | None = None
    filling: int | None = None
    factors: str | FactorFunction | None = None

    def __post_init__(self) -> None:
        if self.traits & Trait.ELEMENTWISE:
            object.__setattr__(self, "factors", elementwise)
