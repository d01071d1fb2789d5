"""Function bodies as plain graphs with shapes, and the translation of their facts to the caller's tensor names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import tensorflow as tf
from tensorflow.python.framework import function_def_to_graph

from autodist.graph.functions import functions_by_name
from autodist.graph.index import GraphIndex
from autodist.graph.op_types import input_names
from autodist.layout.factors import Count, Factor, Factors, PartialSum
from autodist.layout.facts import (
    REPLICATED,
    Base,
    Columnwise,
    Coordinates,
    Dims,
    DistinctIndices,
    Fact,
    Form,
    GeneratorState,
    ListOf,
    LoopValue,
    Permutation,
    Positions,
    RowIndices,
    RowsWithTail,
    Sharded,
    form_of,
)
from autodist.layout.kinds import Elements
from autodist.layout.op_context import OpContext

Rename = Callable[[str], str]

DrawAt = tuple[str, str]
"""The location of a random op in a function: the tensor name prefix of its call path, and the node."""

RowsOfDraw = tuple[int, int]
"""The axis along which a draw has rows in the order of the examples, and the number of rows per example."""


@dataclass(frozen=True)
class Body:
    """A function's nodes, and the tensors that are its arguments and results."""

    graph_def: tf.compat.v1.GraphDef
    library: tf.compat.v1.FunctionDefLibrary
    arguments: list[str]
    outputs: list[str]

    @cached_property
    def index(self) -> GraphIndex:
        return GraphIndex(self.graph_def)

    @cached_property
    def _graph(self) -> tf.Graph:
        graph_def = tf.compat.v1.GraphDef()
        graph_def.CopyFrom(self.graph_def)
        graph_def.library.CopyFrom(self.library)
        for node in graph_def.node:
            node.attr.pop("_class", None)  # it may colocate with a node of the caller
        with tf.Graph().as_default() as graph:
            tf.graph_util.import_graph_def(graph_def, name="")
        return graph

    def shape(self, tensor: str) -> tf.TensorShape:
        """Returns the static shape of a tensor; imports the body on first use."""
        return self._graph.get_tensor_by_name(tensor).shape

    def specs_of(self, node: str) -> list[tf.TensorSpec]:
        """Returns the static shapes and dtypes of a node's outputs."""
        return [tf.TensorSpec(made.shape, made.dtype) for made in self._graph.get_operation_by_name(node).outputs]


class Library:
    """The functions of a graph; bodies are cached by function, argument shapes and variable handles."""

    def __init__(self, library: tf.compat.v1.FunctionDefLibrary) -> None:
        self._library = library
        self._bodies: dict[object, Body] = {}
        self.draws: dict[DrawAt, RowsOfDraw | None] = {}

    @cached_property
    def _definitions(self) -> dict[str, tf.compat.v1.FunctionDef]:
        return functions_by_name(self._library)

    @cached_property
    def _function_graph(self) -> tf.Graph:
        """A graph in which each function is an op, which is how TF1 functions (`Defun`) are called."""
        with tf.Graph().as_default() as graph:
            tf.graph_util.import_graph_def(tf.compat.v1.GraphDef(library=self._library), name="")
        return graph

    def note_draw(self, at: DrawAt, ctx: OpContext, drawn: Fact) -> None:
        """Records a random op whose seed is replicated but whose numbers are not; the last call counts."""
        self.draws.pop(at, None)
        first, *_ = called = input_names(ctx.node.op)
        seed = next(fact for fact, name in zip(ctx.facts, called, strict=True) if name in ("seed", "key"))
        if form_of(seed) != REPLICATED or isinstance(seed, GeneratorState) or form_of(drawn) == REPLICATED:
            return
        is_by_shape = first == "shape" and all(form_of(fact) == REPLICATED for fact in ctx.facts[1:])
        rows = drawn.rows if isinstance(drawn, Form) and is_by_shape else None
        per = None if rows is None else rows.whole_per
        self.draws[at] = None if rows is None or per is None else (rows.axis, per)

    def has(self, function: str) -> bool:
        return function in self._definitions

    def body(
        self,
        function: str,
        shapes: Sequence[tf.TensorShape],
        nodes: Sequence[tf.compat.v1.NodeDef | None],
    ) -> Body:
        """Returns the body of a function for arguments of these shapes.

        Args:
            function: its name.
            shapes: of the arguments, from the caller.
            nodes: for an argument that is a variable's handle or a constant integer, the node that creates it. Without
                the handle, the shapes of the variable's reads would be unknown; without axes, so would the shapes of
                gradients of sums over them.
        """
        known = tuple(None if node is None else node.SerializeToString(deterministic=True) for node in nodes)
        key = (function, tuple(map(str, shapes)), known)
        if key not in self._bodies:
            self._bodies[key] = self._make(self._definitions[function], shapes, nodes)
        return self._bodies[key]

    def _make(
        self,
        definition: tf.compat.v1.FunctionDef,
        shapes: Sequence[tf.TensorShape],
        nodes: Sequence[tf.compat.v1.NodeDef | None],
    ) -> Body:
        protos = [shape.as_proto() for shape in shapes]
        with self._function_graph.as_default():
            graph_def, flat = function_def_to_graph.function_def_to_graph_def(definition, protos)
        names = [argument.name for argument in definition.signature.input_arg]
        known = {name: node for name, node in zip(names, nodes, strict=True) if node is not None}
        given = dict(zip(names, protos, strict=True))
        for node in graph_def.node:
            if node.name in known:
                _replace_argument(node, known[node.name])
            elif node.name in given and node.attr["shape"].shape.unknown_rank:
                node.attr["shape"].shape.CopyFrom(given[node.name])  # a `Defun` has no argument shapes
        outputs = [flat[definition.ret[output.name]] for output in definition.signature.output_arg]
        tensors = [name if ":" in name else f"{name}:0" for name in outputs]
        return Body(graph_def, self._library, [f"{name}:0" for name in names], tensors)


def _replace_argument(argument: tf.compat.v1.NodeDef, made_by: tf.compat.v1.NodeDef) -> None:
    """Replaces a function's argument by the variable handle or the constant that the caller passes."""
    name = argument.name
    argument.CopyFrom(made_by)
    argument.name = name
    del argument.input[:]
    argument.attr.pop("_class", None)


def leave(facts: Sequence[Fact], ctx: OpContext, tag: str) -> list[Fact]:
    """Translates the facts of a function's results to the caller's tensor names.

    A scalar that exists only in the body cannot be a factor in the caller, unless the function returns it.

    Args:
        facts: of the results.
        ctx: the call.
        tag: name prefix of the body's tensors.
    """
    names: dict[str, str] = {}
    for index, fact in enumerate(facts):
        scalar = _returned_scalar(fact)
        if scalar is not None and scalar.startswith(tag):
            names.setdefault(scalar, ctx.named(index))
    return [_translate(fact, names, ctx, tag) for fact in facts]


def _returned_scalar(fact: Fact) -> str | None:
    """Returns the scalar that a result equals, up to a constant common to all replicas; None if there is none."""
    if isinstance(fact, Form) and fact.base is Base.REPLICATED:
        for factor, exponent in fact.factors:
            if isinstance(factor, PartialSum) and exponent == 1 and fact.factors == factor.without | {(factor, 1)}:
                return factor.tensor
    return None


def _translate(fact: Fact, names: dict[str, str], ctx: OpContext, tag: str) -> Fact:
    try:
        return _rename(fact, lambda tensor: names[tensor] if tensor.startswith(tag) else tensor)
    except KeyError as missing:
        inner = str(missing).strip("'").removeprefix(tag)
        return ctx.unknown(f"it depends on a sum over the batch inside a function, '{inner}'")


def _rename(fact: Fact, outer: Rename) -> Fact:
    match fact:
        case Form():
            return _rename_form(fact, outer)
        case Dims():
            return replace(fact, forms=tuple(_rename_form(form, outer) for form in fact.forms))
        case ListOf():
            return fact if fact.element is None else ListOf(_rename(fact.element, outer))
        case Positions():
            return _rename_positions(fact, outer)
        case Coordinates():
            return _rename_coordinates(fact, outer)
        case RowIndices():
            return replace(fact, within=_rename_rows(fact.within, outer), rows=_rename_form(fact.rows, outer))
        case Columnwise(Coordinates() as columns):
            return replace(fact, columns=_rename_coordinates(columns, outer))
        case Columnwise(Positions() as columns):
            return replace(fact, columns=_rename_positions(columns, outer))
        case Permutation():
            return replace(fact, within=_rename_rows(fact.within, outer))
        case RowsWithTail():
            rest = _rename_form(fact.rest, outer) if isinstance(fact.rest, Form) else fact.rest
            return replace(fact, first=_rename_form(fact.first, outer), rest=rest)
        case LoopValue():
            return replace(fact, within=_rename_rows(fact.within, outer))
        case DistinctIndices():
            return replace(fact, rows=_rename_form(fact.rows, outer))
    return fact


def _rename_form(form: Form, outer: Rename) -> Form:
    base = _rename_rows(form.base, outer) if isinstance(form.base, Sharded) else form.base
    return replace(form, base=base, factors=_rename_factors(form.factors, outer))


def _rename_rows(rows: Sharded, outer: Rename) -> Sharded:
    return replace(rows, count=_rename_count(rows.count, outer))


def _rename_coordinates(coordinates: Coordinates, outer: Rename) -> Coordinates:
    return Coordinates(_rename_positions(coordinates.positions, outer))


def _rename_positions(positions: Positions, outer: Rename) -> Positions:
    within, entries = (_rename_rows(rows, outer) for rows in (positions.within, positions.entries))
    return replace(positions, within=within, entries=entries)


def _rename_factors(factors: Factors, outer: Rename) -> Factors:
    renamed = {_rename_factor(factor, outer): exponent for factor, exponent in factors}
    if len(renamed) < len(factors):
        raise KeyError("two sums with one name")
    return frozenset(renamed.items())


def _rename_factor(factor: Factor, outer: Rename) -> Factor:
    if isinstance(factor, PartialSum):
        return PartialSum(outer(factor.tensor), _rename_factors(factor.without, outer))
    return _rename_count(factor, outer)


def _rename_count(count: Count, outer: Rename) -> Count:
    return Count(Elements(outer(count.of.tensor))) if isinstance(count.of, Elements) else count
