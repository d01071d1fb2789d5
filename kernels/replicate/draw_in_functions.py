"""Random draws in functions of loops and branches, one row per example from a seed that all replicas share."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from autodist.graph.editor import GraphEditor, NodeDef
from autodist.graph.functions import add_function, functions_by_name
from autodist.graph.names import is_control, node_of
from autodist.graph.op_types import input_names, types_of_inputs, types_of_outputs
from autodist.graph.ops import Trait, having
from autodist.graph.step import PlacedStep
from autodist.graph.subgraph import subgraph
from autodist.kernels.communicate.buckets import digest
from autodist.kernels.finish.called_function import CalledFunction, call_node, shared_function
from autodist.kernels.finish.compilable import NOT_IN_XLA
from autodist.kernels.replicate.advance_generators import STRIDE, AddedToDraws
from autodist.kernels.replicate.draw_by_key import first_and_all, rows_of_whole
from autodist.layout import DrawAt, Propagation, RowsOfDraw

_PART, _PASSED_ON = "autodist_part", "autodist_part_passed_on"
_LOOPS = having(Trait.LOOP)

Draws = Mapping[DrawAt, RowsOfDraw | None]


def draw_in_functions(
    editor: GraphEditor,
    step: PlacedStep,
    flows: Propagation,
    replica_dependent: Set[str],
    examples: str | None,
    replicas: int,
) -> AddedToDraws:
    """Makes functions draw for the whole batch and slice the rows of their replica, equal to those of one device.

    All replicas share the functions, so the functions get another argument with the replica's part of the batch. If the
    whole batch or the number of rows per example is unknown, each replica draws from a different seed.

    Args:
        editor: of the step.
        step: the captured step.
        flows: the dependence of its tensors on the batch.
        replica_dependent: the nodes that are copied for every replica.
        examples: the tensor with the number of examples of all replicas; None: each worker only knows its own.
        replicas: number of replicas.
    """
    indices: list[str] = []
    nodes: dict[str, str] = {}
    for node in step.graph_index.having(Trait.CALL | Trait.BRANCH | Trait.LOOP):
        draws = flows.draws_within(node.name) if node.name in replica_dependent else {}
        if not draws:
            continue
        with subgraph(editor, f"part_of/{node.name}") as f:
            index = tf.constant([1], tf.int64)
            first, count = (index, tf.constant(0, tf.int64))
            if examples is not None:
                first, count = first_and_all(f, index, examples, replicas)
            part = tf.concat([first, count[tf.newaxis], index * STRIDE], 0)
        _Functions(editor, draws, examples is not None).extend(editor[node.name], f"{node.name}:0>", f.name(part))
        editor.set_inputs(node.name, editor[node.name].input)
        indices.append(node_of(f.name(index)))
        nodes |= dict.fromkeys(f.made, node.name)
    return AddedToDraws(tuple(indices), nodes)


@dataclass(frozen=True)
class _Functions:
    """Functions with another argument: the first example, the number of all examples and the offset of seeds.

    Attributes:
        editor: of the graph that calls them.
        draws: the draws in them.
        knows_all: True if the whole batch is known.
    """

    editor: GraphEditor
    draws: Draws
    knows_all: bool

    def extend(self, node: NodeDef, path: str, part: str) -> None:
        """Makes a node pass `part` to the functions that it calls; `path` leads to them."""
        is_loop = node.op in _LOOPS
        for key, value in node.attr.items():
            for called in [value.func] if value.HasField("func") else value.list.func:
                called.name = self._extended(called.name, f"{path}{called.name}>", is_loop and key == "body")
        node.attr["T" if is_loop else "Tin"].list.type.append(tf.int64.as_datatype_enum)
        if is_loop and node.attr["output_shapes"].list.shape:
            node.attr["output_shapes"].list.shape.append(tf.TensorShape([3]).as_proto())
        data = [i for i in node.input if not is_control(i)]
        node.input[:] = [*data, part, *filter(is_control, node.input)]

    def _extended(self, name: str, path: str, is_body: bool) -> str:
        definition = copy.deepcopy(functions_by_name(self.editor.library)[name])
        definition.attr.pop("_input_shapes", None)
        definition.signature.input_arg.add(name=_PART, type=tf.int64.as_datatype_enum)
        for node in definition.node_def:
            within = f"{path}{node.name}:0>"
            if (path, node.name) in self.draws:
                self._draw(node, self.draws[path, node.name])
            elif any(at.startswith(within) for at, _ in self.draws):
                self.extend(node, within, _PART)
        if is_body:
            definition.signature.output_arg.add(name=_PASSED_ON, type=tf.int64.as_datatype_enum)
            definition.ret[_PASSED_ON] = _PART
        return self._add(definition)

    def _add(self, definition: Any) -> str:
        content = definition.SerializeToString(deterministic=True)
        definition.signature.name = f"{definition.signature.name}_{digest(content.hex())}"
        add_function(self.editor.library, definition)
        return str(definition.signature.name)

    def _draw(self, node: NodeDef, rows: RowsOfDraw | None) -> None:
        """Replaces a drawing node of a function by a call of the function that draws for this replica."""
        data = [i for i in node.input if not is_control(i)]
        instead = _for_all(node, rows) if rows is not None and self.knows_all else _apart(node)
        add_function(self.editor.library, instead.definition)
        call = call_node(node.name, node.device, instead, filter(is_control, node.input))
        inputs = {_PART: _PART, **{f"input_{k}": name for k, name in enumerate(data)}}
        call.input[:] = [i if is_control(i) else inputs[i] for i in call.input]
        node.CopyFrom(call)


def _for_all(node: NodeDef, rows: RowsOfDraw) -> CalledFunction:
    """Builds the function that draws for the whole batch and slices the rows of a part."""
    editor, inputs = _with_inputs(node)
    [dtype] = map(tf.as_dtype, types_of_outputs(node))
    with subgraph(editor, "draw", _specs(node).__getitem__) as f:
        part = f.input(_PART, tf.int64, [3])
        made = rows_of_whole(f, node, inputs, dtype, rows, part[:1], part[1])
    function = shared_function([editor[name] for name in f.made], [f.name(made)], "node_{0}".format)
    function.definition.attr[NOT_IN_XLA].b = True
    return function


def _apart(node: NodeDef) -> CalledFunction:
    """Builds the function that draws from a different seed on each replica."""
    editor, inputs = _with_inputs(node)
    at = next(k for k, name in enumerate(input_names(node.op)) if name in ("seed", "key"))
    with subgraph(editor, "draw", _specs(node).__getitem__) as f:
        seed, part = f.input(inputs[at]), f.input(_PART, tf.int64, [3])
        own = seed + tf.pad(tf.cast(part[2:], seed.dtype), [[0, tf.size(seed) - 1]])
        drawing = f.add(node, "own", [*inputs[:at], f.name(own), *inputs[at + 1 :]])
    return shared_function([editor[name] for name in f.made], [f"{drawing.name}:0"], "node_{0}".format)


def _specs(node: NodeDef) -> dict[str, tf.TensorSpec]:
    return {f"input_{k}:0": tf.TensorSpec(None, tf.as_dtype(kind)) for k, kind in enumerate(types_of_inputs(node))}


def _with_inputs(node: NodeDef) -> tuple[GraphEditor, Sequence[str]]:
    """Returns a graph with placeholders for a function's arguments, and the names of a node's inputs in it."""
    definition = tf.compat.v1.GraphDef()
    definition.node.add(name=_PART, op="Placeholder").attr["dtype"].type = tf.int64.as_datatype_enum
    names = []
    for k, kind in enumerate(types_of_inputs(node)):
        names.append(f"input_{k}")
        definition.node.add(name=names[-1], op="Placeholder").attr["dtype"].type = kind
    return GraphEditor(definition), names
