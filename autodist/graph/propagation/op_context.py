"""Site: one node as its rule sees it, with what is known of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import tensorflow as tf

from autodist.graph.ops import Trait, filling, having
from autodist.graph.propagation.factors import PartialSum
from autodist.graph.propagation.facts import SAME, Dims, Fact, Form, Recovery, UnknownFact, form_of

_PASSING = having(Trait.SAME | Trait.RESHAPES | Trait.CASTS | Trait.REPEATS)


class Scope(Protocol):
    """The graph, or the function body, in which a node stands."""

    tag: str

    def producer(self, tensor: str) -> tf.compat.v1.NodeDef | None:
        """The node that makes a tensor; None for an argument of a function."""

    def shape(self, tensor: str) -> tf.TensorShape:
        """What is known of a tensor's shape."""

    def constant(self, tensor: str) -> np.ndarray | None:
        """A tensor's value where it is a constant."""

    def fact(self, tensor: str) -> Fact:
        """What is known of a tensor."""

    def same_as(self, key: object, tensor: str) -> str:
        """The first tensor that was given for a key: what tensors with one key are is the same, by different nodes."""

    def call(self, site: OpContext, function: str, arguments: list[Fact], tensors: list[str]) -> list[Fact]:
        """The facts of a library function's results for these arguments."""


@dataclass(frozen=True)
class OpContext:
    """One node and the facts of its data inputs.

    Attributes:
        node: its definition.
        inputs: names of the tensors that it reads, without control inputs.
        facts: what is known of each.
        scope: the graph that it stands in.
    """

    node: tf.compat.v1.NodeDef
    inputs: list[str]
    facts: list[Fact]
    scope: Scope

    def named(self, index: int = 0) -> str:
        """The name under which an output serves as a factor: unlike any other, in functions too."""
        return f"{self.scope.tag}{self.node.name}:{index}"

    def form(self, index: int) -> Form | UnknownFact:
        """The fact of an input as a form; a statistic counts as opaque."""
        form = form_of(self.facts[index])
        return form if isinstance(form, (Form, UnknownFact)) else UnknownFact(form.reason)

    def forms(self, *indices: int) -> list[Form] | UnknownFact:
        """The facts of several inputs as forms; the first of which nothing is known speaks for all."""
        found = []
        for index in indices:
            form = self.form(index)
            if isinstance(form, UnknownFact):
                return UnknownFact(form.reason)
            found.append(form)
        return found

    def shape(self, index: int) -> tf.TensorShape:
        return self.scope.shape(self.inputs[index])

    def rank(self, index: int) -> int | None:
        return self.shape(index).rank

    def output_shape(self, index: int = 0) -> tf.TensorShape:
        return self.scope.shape(f"{self.node.name}:{index}")

    def constant(self, index: int) -> np.ndarray | None:
        """The value of an input where it is a constant, else None."""
        return self.scope.constant(self.inputs[index])

    def integers(self, index: int) -> list[int | None] | None:
        """The elements of an integer input, None for those that are not known; None if not even their number is."""
        dims = self.dims(index)
        return None if dims is None else list(dims.values)

    def elements(self, index: int) -> list[int | None] | None:
        """The elements of an integer input, one after the other, where it may be put together from single ones."""
        known = self.integers(index)
        if known is not None and None not in known:
            return known
        tensor, node = self._origin(index)
        value = self.scope.constant(tensor)
        if value is not None:
            return [int(element) for element in value.reshape(-1)]
        if node is None or node.op != "Pack":
            return known
        sources = [tensor_name(name) for name in node.input if not name.startswith("^")]
        if any(self.scope.shape(name).rank != 0 for name in sources):
            return known
        values = [self.scope.constant(name) for name in sources]
        return [None if value is None else int(value) for value in values]

    def scalar(self, index: int) -> int | None:
        """The value of an integer input with one element, if it is known."""
        values = self.integers(index)
        return values[0] if values and len(values) == 1 else None

    def dims(self, index: int) -> Dims | None:
        """An integer input as elements, each with its form and value; None if it is nothing of the kind."""
        fact = self.facts[index]
        if isinstance(fact, Dims):
            return fact
        value = self.constant(index)
        if value is not None and value.ndim <= 1:
            values = tuple(int(element) for element in value.reshape(-1))
            return Dims((SAME,) * len(values), values, value.ndim == 0)
        shape = self.shape(index)
        if not isinstance(fact, Form) or fact.rows is not None or shape.rank not in (0, 1):
            return None
        length = 1 if shape.rank == 0 else shape[0]
        return None if length is None else Dims((fact,) * length, (None,) * length, shape.rank == 0)

    def is_zero(self, index: int) -> bool:
        """Whether an input is known to hold zeros only."""
        return self.is_filled_with(index, 0)

    def is_filled_with(self, index: int, number: int) -> bool:
        """Whether all elements of an input are known to be this number."""
        value = self._elements(index)
        return value is not None and bool(np.all(value == number))

    def is_uniform(self, index: int) -> bool:
        """Whether all elements of an input are known to be equal, so that its length tells nothing of examples."""
        _, node = self._origin(index)
        value = self._elements(index)
        is_filled = node is not None and node.op == "Fill"
        return is_filled or (value is not None and (value.size <= 1 or bool(np.all(value == value.flat[0]))))

    def _elements(self, index: int) -> np.ndarray | None:
        """What elements an input is known to have; once, where all are the same."""
        tensor, node = self._origin(index)
        if node is not None and (number := filling(node.op)) is not None:
            return np.asarray(number)
        if node is not None and node.op == "Fill":
            tensor = tensor_name(node.input[1])
        return self.scope.constant(tensor)

    def _origin(self, index: int) -> tuple[str, tf.compat.v1.NodeDef | None]:
        tensor = self.inputs[index]
        node = self.scope.producer(tensor)
        while node is not None and node.op in _PASSING:
            tensor = tensor_name(node.input[0])
            node = self.scope.producer(tensor)
        return tensor, node

    def opaque(self, why: str, recovery: Recovery = Recovery.NEVER) -> UnknownFact:
        """The answer of a rule that cannot go on: which node, which op, why."""
        return UnknownFact(f"node '{self.node.name}' ({self.node.op}): {why}", recovery)

    def additive(self, form: Form, index: int = 0) -> Form:
        """The form of an output of this node, a scalar that adds up once `form`'s factors are divided out."""
        part = PartialSum(self.named(index), form.factors)
        return Form(factors=form.factors | {(part, 1)}, mixed_at=form.mixed_at)

    def flag(self, name: str) -> bool:
        """A boolean attribute."""
        return bool(self._attribute(name).b)

    def number(self, name: str) -> int:
        """An integer attribute."""
        return int(self._attribute(name).i)

    def text(self, name: str) -> str:
        """A string attribute."""
        return bytes(self._attribute(name).s).decode()

    def _attribute(self, name: str) -> tf.compat.v1.AttrValue:
        """As `attr[name]`, which adds what is not there to the node."""
        return self.node.attr.get(name, _NO_VALUE)


_NO_VALUE = tf.compat.v1.AttrValue()

Rule = Callable[[OpContext], "Fact | list[Fact]"]


def tensor_name(reference: str) -> str:
    """An input of a node as a tensor's name: "node" is "node:0"."""
    return reference if ":" in reference else f"{reference}:0"


def op_names(text: str) -> list[str]:
    """Names of ops that are written with spaces between them, as long lists of them read best."""
    return text.split()
