"""OpContext: one node together with the facts of its inputs, as its propagation rule receives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import tensorflow as tf

from autodist.graph.names import data_inputs
from autodist.graph.ops import MOST_AXES, OpView, Trait, filling, having
from autodist.layout.factors import PartialSum
from autodist.layout.facts import REPLICATED, Dims, Fact, Form, Recovery, UnknownFact, form_of

_PASSING = having(Trait.IDENTITY | Trait.RESHAPES | Trait.CASTS | Trait.REPEATS)


class Scope(Protocol):
    """The graph or function body that contains a node."""

    tag: str

    def producer(self, tensor: str) -> tf.compat.v1.NodeDef | None:
        """Returns the node that produces a tensor; None for an argument of a function."""

    def shape(self, tensor: str) -> tf.TensorShape:
        """Returns the static shape of a tensor."""

    def constant(self, tensor: str) -> np.ndarray | None:
        """Returns the value of a constant tensor; None for any other."""

    def fact(self, tensor: str) -> Fact:
        """Returns the fact of a tensor."""

    def same_as(self, key: object, tensor: str) -> str:
        """Returns the first tensor registered under a key.

        Tensors with equal keys hold equal values, from different nodes.
        """

    def call(self, ctx: OpContext, function: str, arguments: list[Fact], tensors: list[str]) -> list[Fact]:
        """Returns the facts of a library function's results for these arguments."""


@dataclass(frozen=True)
class OpContext(OpView):
    """One node and the facts of its data inputs.

    Attributes:
        node: its NodeDef.
        inputs: names of its input tensors, without control inputs.
        facts: the fact of each input.
        scope: the graph or function body that contains it.
    """

    node: tf.compat.v1.NodeDef
    inputs: list[str]
    facts: list[Fact]
    scope: Scope

    def named(self, index: int = 0) -> str:
        """Returns the name by which a factor refers to an output; unique across function bodies."""
        return f"{self.scope.tag}{self.node.name}:{index}"

    def form(self, index: int) -> Form | UnknownFact:
        """Returns the fact of an input as a form; a statistic counts as unknown."""
        form = form_of(self.facts[index])
        return form if isinstance(form, (Form, UnknownFact)) else UnknownFact(form.reason)

    def forms(self, *indices: int) -> list[Form] | UnknownFact:
        """Returns the facts of several inputs as forms, or the first unknown one."""
        forms = []
        for index in indices:
            form = self.form(index)
            if isinstance(form, UnknownFact):
                return UnknownFact(form.reason)
            forms.append(form)
        return forms

    def shape(self, index: int) -> tf.TensorShape:
        return self.scope.shape(self.inputs[index])

    def output_shape(self, index: int = 0) -> tf.TensorShape:
        return self.scope.shape(f"{self.node.name}:{index}")

    def constant(self, index: int) -> np.ndarray | None:
        """Returns the value of an input if it is a constant, else None."""
        return self.scope.constant(self.inputs[index])

    def integers(self, index: int) -> list[int | None] | None:
        """Returns the elements of an integer input, None for unknown ones; None if their number is unknown."""
        dims = self.dims(index)
        return None if dims is None else list(dims.values)

    def elements(self, index: int) -> list[int | None] | None:
        """Returns the elements of an integer input, also if it is packed from scalars."""
        known = self.integers(index)
        if known is not None and None not in known:
            return known
        tensor, node = self.origin(index)
        value = self.scope.constant(tensor)
        if value is not None:
            return [int(element) for element in value.reshape(-1)]
        if node is None or node.op != "Pack":
            return known
        sources = data_inputs(node)
        if any(self.scope.shape(name).rank != 0 for name in sources):
            return known
        values = [self.scope.constant(name) for name in sources]
        return [None if value is None else int(value) for value in values]

    def axes_listed(self, index: int, of: int) -> set[int] | None:
        """Returns the axes of operand `of` that operand `index` lists, counted from 0; None if unknown.

        TensorFlow emits `range(rank(x))` if the rank is unknown at graph construction.
        """
        return set(range(self.rank(of) or MOST_AXES)) if self._is_all_axes(index) else super().axes_listed(index, of)

    def _is_all_axes(self, index: int) -> bool:
        node = self.scope.producer(self.inputs[index])
        if node is None or node.op != "Range":
            return False
        limit = self.scope.producer(node.input[1])
        start = self.scope.constant(node.input[0])
        return limit is not None and limit.op == "Rank" and start is not None and not np.any(start)

    def dims(self, index: int) -> Dims | None:
        """Returns an integer input as elements with form and value; None for any other input."""
        fact = self.facts[index]
        if isinstance(fact, Dims):
            return fact
        value = self.constant(index)
        if value is not None and value.ndim <= 1 and value.dtype.kind in "iu":
            values = tuple(int(element) for element in value.reshape(-1))
            return Dims((REPLICATED,) * len(values), values, value.ndim == 0)
        shape = self.shape(index)
        if not isinstance(fact, Form) or fact.rows is not None or shape.rank not in (0, 1):
            return None
        length = 1 if shape.rank == 0 else shape[0]
        return None if length is None else Dims((fact,) * length, (None,) * length, shape.rank == 0)

    def is_zero(self, index: int) -> bool:
        """Returns True if an input is known to be all zeros."""
        return self.is_filled_with(index, 0)

    def is_filled_with(self, index: int, number: int) -> bool:
        """Returns True if all elements of an input are known to be this number."""
        value = self._elements(index)
        return value is not None and bool(np.all(value == number))

    def is_uniform(self, index: int) -> bool:
        """Returns True if all elements of an input are known to be equal; its length then implies no examples."""
        _, node = self.origin(index)
        value = self._elements(index)
        is_filled = node is not None and node.op == "Fill"
        return is_filled or (value is not None and (value.size <= 1 or bool(np.all(value == value.flat[0]))))

    def _elements(self, index: int) -> np.ndarray | None:
        """Returns the known elements of an input; a single one if all are equal."""
        tensor, node = self.origin(index)
        if node is not None and (number := filling(node.op)) is not None:
            return np.asarray(number)
        if node is not None and node.op == "Fill":
            tensor = tensor_name(node.input[1])
        return self.scope.constant(tensor)

    def origin(self, index: int) -> tuple[str, tf.compat.v1.NodeDef | None]:
        """Returns the tensor whose elements an input has, perhaps repeated, and the node that produces it."""
        tensor = self.inputs[index]
        node = self.scope.producer(tensor)
        while node is not None and node.op in _PASSING:
            tensor = tensor_name(node.input[0])
            node = self.scope.producer(tensor)
        return tensor, node

    def unknown(self, why: str, recovery: Recovery = Recovery.NEVER) -> UnknownFact:
        """Returns an unknown fact for this node; the reason names the node and the op."""
        return UnknownFact(f"node '{self.node.name}' ({self.node.op}): {why}", recovery)

    def additive(self, form: Form, index: int = 0) -> Form:
        """Returns the form of a scalar output of this node that is a partial sum once divided by `form`'s factors."""
        part = PartialSum(self.named(index), form.factors)
        return Form(factors=form.factors | {(part, 1)}, mixed_at=form.mixed_at)


Rule = Callable[[OpContext], "Fact | list[Fact]"]


def tensor_name(reference: str) -> str:
    """Returns the tensor name of a node's input: "node" → "node:0"."""
    return reference if ":" in reference else f"{reference}:0"


def op_names(text: str) -> list[str]:
    """Splits a space-separated list of op names, which keeps long lists readable."""
    return text.split()
