"""Factor rules: how an op maps the axes of its operands to the axes of its results.

An axis belongs to a *factor*; axes of one factor are divided alike. A rule is written like an einsum: `mk,kn->mn` is a
matrix product. Factor k occurs in no result: it is reduced. A rule states where the parts of a tensor are. It does not
state which operands the op is linear in; that is another column of the op table.

| in a rule | meaning |
|---|---|
| a letter | an axis of this factor |
| `...` | any number of axes, aligned from the right; an operand may lack some of them, or repeat one of length 1 |
| `*` | an axis that the op needs whole |
| `-` | an operand without factors: all parts of the op take it whole |
| `#` | an operand that holds the lengths of the first result |

Operands after the last one that is written have no factors. A rule with one result is the rule of all results.
"""

from __future__ import annotations

import enum
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

Factor = str | int
Axes = tuple[Factor | None, ...]
"""The factor of each axis of a tensor; None for an axis that the op needs whole."""

MOST_AXES = 254
"""TensorFlow's limit. A rule that counts axes from the left takes it for an unknown rank."""


class ReducedBy(enum.Enum):
    """Reductions of the parts of a result to the whole result."""

    SUM = "the sum"
    MEAN = "the mean, weighted by the lengths of the parts"
    MAX = "the largest value"
    MIN = "the smallest value"
    PRODUCT = "the product"
    NORM = "the root of the sum of squares"


@dataclass(frozen=True)
class FactorRule:
    """The factors of one node.

    Attributes:
        operands: the axes of each operand; None for an operand without factors.
        results: the axes of each result, or of all results if there is one entry.
        reduced: how the parts are combined for a factor that occurs in no result; None: they cannot be combined.
        lengths: the operands that hold the lengths of the first result.
    """

    operands: tuple[Axes | None, ...]
    results: tuple[Axes, ...]
    reduced: ReducedBy | None = ReducedBy.SUM
    lengths: tuple[int, ...] = ()

    def factor(self, operand: int, axis: int) -> Factor | None:
        """Returns the factor of an operand's axis; None if the op needs the axis whole."""
        axes = self.operands[operand]
        return None if axes is None or axis >= len(axes) else axes[axis]

    def axis(self, operand: int, factor: Factor) -> int | None:
        """Returns the axis of an operand that belongs to a factor; None if it has none."""
        axes = self.operands[operand]
        return None if axes is None or factor not in axes else axes.index(factor)

    def result_axis(self, factor: Factor, result: int = 0) -> int | None:
        """Returns the axis of a result that belongs to a factor; None if the factor is reduced."""
        axes = self.results[min(result, len(self.results) - 1)]
        return axes.index(factor) if factor in axes else None


class OpView(ABC):
    """One node, and the static knowledge of its operands.

    Attributes:
        node: its NodeDef.
        inputs: names of its input tensors, without control inputs.
    """

    node: tf.compat.v1.NodeDef
    inputs: list[str]

    @abstractmethod
    def shape(self, index: int) -> tf.TensorShape:
        """Returns the static shape of an operand."""

    @abstractmethod
    def constant(self, index: int) -> np.ndarray | None:
        """Returns the value of an operand if it is a constant, else None."""

    def integers(self, index: int) -> Sequence[int | None] | None:
        """Returns the elements of an integer operand, None for unknown ones; None if their number is unknown."""
        value = self.constant(index)
        is_integer = value is not None and value.dtype.kind in "iu"
        return [int(element) for element in value.reshape(-1)] if value is not None and is_integer else None

    def rank(self, index: int) -> int | None:
        return self.shape(index).rank

    def scalar(self, index: int) -> int | None:
        """Returns the value of an integer operand with one element, or None if unknown."""
        values = self.integers(index)
        return values[0] if values and len(values) == 1 else None

    def axes_listed(self, index: int, of: int) -> set[int] | None:
        """Returns the axes of operand `of` that operand `index` lists, counted from 0; None if unknown."""
        rank, values = self.rank(of), self.integers(index)
        if values is None or None in values or (rank is None and any((value or 0) < 0 for value in values)):
            return None
        return {value % (rank or MOST_AXES) for value in values if value is not None} if rank != 0 else set()

    def flag(self, name: str) -> bool:
        """Returns a boolean attribute."""
        return bool(self._attribute(name).b)

    def number(self, name: str) -> int:
        """Returns an integer attribute."""
        return int(self._attribute(name).i)

    def numbers(self, name: str) -> list[int]:
        """Returns an attribute that is a list of integers."""
        return list(self._attribute(name).list.i)

    def text(self, name: str) -> str:
        """Returns a string attribute."""
        return bytes(self._attribute(name).s).decode()

    def _attribute(self, name: str) -> tf.compat.v1.AttrValue:
        """Returns an attribute like `attr[name]`, which would add a missing attribute to the node."""
        return self.node.attr.get(name, _NO_VALUE)


_NO_VALUE = tf.compat.v1.AttrValue()

FactorFunction = Callable[[OpView], FactorRule | None]
"""Computes the rule of a node from its attributes, shapes and constants; None if they do not determine it."""


def notation(op: OpView, text: str, reduced: ReducedBy | None = ReducedBy.SUM) -> FactorRule | None:
    """Returns the rule that a notation describes; None if the rank of an operand with `...` is unknown."""
    written = text.partition("->")[0].split(",")
    ranks = tuple(op.rank(k) if k < len(op.inputs) and "..." in term else 0 for k, term in enumerate(written))
    return None if None in ranks else _parsed(text, ranks, len(op.inputs), reduced)


@functools.cache
def _parsed(text: str, ranks: tuple[int, ...], count: int, reduced: ReducedBy | None) -> FactorRule:
    operands, _, results = text.replace(" ", "").partition("->")
    terms = operands.split(",")
    repeated = {letter for term in terms for letter in term if letter.isalpha() and term.count(letter) > 1}
    if repeated:  # a diagonal
        whole = "".join("*" if letter in repeated else letter for letter in text)
        return _parsed(whole, ranks, count, reduced)
    open_axes = [rank - len(term) + 3 for term, rank in zip(terms, ranks, strict=True) if "..." in term]
    axes = [_axes(term, rank - len(term) + 3) for term, rank in zip(terms, ranks, strict=True)]
    return FactorRule(
        (*axes, *[None] * (count - len(axes))),
        tuple(_axes(term, max(open_axes, default=0)) or () for term in results.split(",")),
        reduced,
        tuple(index for index, term in enumerate(terms) if term == "#"),
    )


def _axes(term: str, open_axes: int) -> Axes | None:
    """Returns the axes of one term; those of `...` are numbered from the right: -2, -1."""
    if term in ("-", "#"):
        return None
    before, dots, after = term.partition("...")
    between = range(-open_axes, 0) if dots else ()
    return (*map(_factor, before), *between, *map(_factor, after))


def _factor(letter: str) -> str | None:
    return None if letter == "*" else letter
