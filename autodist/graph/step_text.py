"""Steps as text: the program of a worker, and the notes that kernels leave for one another.

Two graphs have equal texts if they do the same under the same names.

Meaningless differences are omitted or normalised: the order of nodes, control inputs and attributes; attributes with
default or missing values, which protobuf adds on reading; TensorFlow's numbers of functions; the encoding of constants.
Names of nodes are kept, since a comparison of two texts needs them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry  # the defaults of attributes

from autodist.graph.functions import functions_by_name
from autodist.graph.in_step_all_reduce import InStepAllReduce, InStepAllReduceKind
from autodist.graph.names import is_control
from autodist.graph.parts import GradientCall, PendingReduction, Variable
from autodist.graph.step import CapturedStep, ReplicatedStep, Step, StepWithOwners
from autodist.placement.holder import Holder
from autodist.sharding import lines_of


def text_of_step(step: Step, captured: Step) -> str:
    """Returns the program of one worker and the placements of its variables, as text."""
    holders, owners = (step.holders, step.owners) if isinstance(step, StepWithOwners) else ({}, {})
    synchrony_of = step.synchrony_of if isinstance(step, ReplicatedStep) else {}
    return _text(
        {
            "runs": _runs(step),
            "inputs": [*_pairs(step.inputs), *(f"{name} has as many rows as {by}" for name, by in step.apart.items())],
            "variables": sorted(_variable(v, owners.get(v.name)) for v in step.variables),
            "placements": [_placement(v.name, holders.get(v.name)) for v in captured.variables],
            "variable placements": [
                f"{name}: {owners.get(name, 'in each row')}, {k.mode.value}, {k.staleness}"
                for name, k in sorted(synchrony_of.items())
            ],
            **sections_of_graph(step.graph_def),
        }
    )


def text_of_notes(step: Step) -> str:
    """Returns the notes of kernels on a step that is not completely rewritten, as text."""
    notes: dict[str, Iterable[str]] = {
        "gradients": [f"{g.variable}: {', '.join(g.tensors)} of call {g.call}" for g in step.gradients],
        "gradient calls": map(_call, step.gradient_calls),
    }
    if isinstance(step, CapturedStep):
        notes |= {"in-step all-reduces": map(_all_reduce, step.in_step_all_reduces)}
        if step.annotations is not None:
            notes["annotations"] = lines_of(step.annotations)
    if isinstance(step, ReplicatedStep):
        notes |= {
            "pending reductions": map(_pending, step.reductions),
            "reduced gradients": sorted(step.reduced_gradients),
        }
    return _text(notes)


def _text(sections: Mapping[str, Iterable[str]]) -> str:
    return "".join(f"{title}\n" + "".join(f"  {line}\n" for line in lines) for title, lines in sections.items())


def _call(call: GradientCall) -> str:
    terms = "".join(f"; {t.value} of {t.tensor} weighed by {t.seed}" for t in call.terms)
    return f"of {', '.join(call.targets)} weighed by {call.seed}{terms}"


def _all_reduce(all_reduce: InStepAllReduce) -> str:
    how = "" if all_reduce.how is InStepAllReduceKind.SUM else f", {all_reduce.how.value} along axis {all_reduce.axis}"
    return f"{all_reduce.node}{' of ' + all_reduce.of if all_reduce.of else ''}{how}"


def _pending(pending: PendingReduction) -> str:
    weight = f" / {pending.weight}" if pending.weight else ""
    return (
        f"{pending.name}: {pending.kind.name.lower()}, level {pending.level}, depth {pending.depth}, "
        f"{pending.merge.name.lower()} of {', '.join(pending.local)}{weight} -> {', '.join(pending.result)}"
    )


def _runs(step: Step) -> Iterator[str]:
    """Yields the outputs in order, and the targets."""
    yield f"returns {', '.join(step.outputs)}" + (", which counts examples" if step.counts_examples else "")
    yield from (f"target {name}" for name in sorted(step.targets))
    yield from (f"background node {name}" for name in sorted(step.background_nodes))
    yield from (f"standing node {name}" for name in sorted(step.standing_nodes))
    for key, one in step.outer_steps.items():
        yield from (f"outer step {key}, every {one.every} steps: {name}" for name in sorted(one.nodes))
    yield from (f"initially {key}: {name}" for key, name in sorted(step.initializers.items()))
    if step.even_parts is not None:
        yield f"needs even parts: {step.even_parts}"


def _pairs(mapping: Mapping[str, object]) -> Iterator[str]:
    return (f"{name}: {value}" for name, value in mapping.items())


def _variable(variable: Variable, owner: int | None) -> str:
    text = f"{variable.name}: {variable.dtype.name}{list(variable.shape)} in {variable.handle}"
    return f"{text} of {owner}" if owner else text


def _placement(name: str, holder: Holder | None) -> str:
    """Describes the holder of a variable; None: every worker holds it, which is shown as the owner -1."""
    if holder is None:
        return f"{name}: partition None, owners (-1,), copies ((),)"
    partitioning = holder.partitioning
    shown = partitioning and f"Partitioning(axis={partitioning.axis}, sizes={partitioning.sizes})"
    owners = tuple(-1 if one.owner is None else one.owner for one in holder.slices)
    copies = tuple(tuple(copy.suffix + copy.encoding for copy in one.copies) for one in holder.slices)
    return f"{name}: partition {shown}, owners {owners}, copies {copies}"


_SHOWN_ELEMENTS = 8
"""Larger constants are shown as a hash."""

_COUNT = re.compile(r"(_\d+)+$")


def sections_of_graph(graph_def: tf.compat.v1.GraphDef) -> dict[str, list[str]]:
    """Returns lines by title: "nodes", and "function NAME" for each called function."""
    functions = _Functions(graph_def)
    nodes = _lines_of_nodes(graph_def.node, functions)
    return {"nodes": nodes, **{f"function {name}": lines for name, lines in functions.sections()}}


class _Functions:
    """The functions of a graph's library, numbered in the order of their first call."""

    def __init__(self, graph_def: tf.compat.v1.GraphDef) -> None:
        self._known = functions_by_name(graph_def.library)
        self._gradients = {g.function_name: g.gradient_func for g in graph_def.library.gradient}
        self._met: dict[str, str] = {}

    def name(self, name: str) -> str:
        """Returns the name of a function in the text."""
        if name not in self._met:
            self._met[name] = f"{_COUNT.sub('', name)}#{len(self._met)}" if name in self._known else name
        return self._met[name]

    def sections(self) -> Iterator[tuple[str, list[str]]]:
        """Yields the title and the lines of each called function, including those called by other functions."""
        done = 0
        while done < len(self._met):
            name = list(self._met)[done]
            done += 1
            if name in self._known:
                yield self._met[name], list(self._lines(self._known[name]))

    def _lines(self, function: Any) -> Iterator[str]:
        signature = function.signature
        yield f"takes {', '.join(f'{a.name}: {_type(a.type)}' for a in signature.input_arg)}"
        yield f"returns {', '.join(f'{function.ret[a.name]}: {_type(a.type)}' for a in signature.output_arg)}"
        yield from (f"runs {name}" for name in sorted(function.control_ret.values()))
        if function.signature.name in self._gradients:
            yield f"has the gradient {self.name(self._gradients[function.signature.name])}"
        yield from (f"has {key}={_attribute(value, self)}" for key, value in sorted(function.attr.items()))
        yield from _lines_of_nodes(function.node_def, self)


def _lines_of_nodes(nodes: Iterable[tf.compat.v1.NodeDef], functions: _Functions) -> list[str]:
    return [_line(node, functions) for node in sorted(nodes, key=lambda node: node.name)]


def _line(node: tf.compat.v1.NodeDef, functions: _Functions) -> str:
    defaults = _defaults(node.op)
    attributes = [
        f"{key}={_attribute(value, functions)}"
        for key, value in sorted(node.attr.items())
        if value.SerializeToString(deterministic=True) not in (b"", defaults.get(key))
    ]
    data = [i for i in node.input if not is_control(i)]
    control = sorted(i for i in node.input if is_control(i))
    shown = f"{node.name} = {functions.name(node.op)}"
    if attributes:
        shown += f"[{', '.join(attributes)}]"
    shown += f"({', '.join([*data, *control])})"
    return f"{shown} on {node.device}" if node.device else shown


@cache
def _defaults(op: str) -> Mapping[str, bytes]:
    """Returns the serialised attributes of an op that have a default."""
    op_def = op_def_registry.get(op)
    if op_def is None:  # the name of a function
        return {}
    return {
        a.name: a.default_value.SerializeToString(deterministic=True)
        for a in op_def.attr
        if a.HasField("default_value")
    }


def _attribute(value: Any, functions: _Functions) -> str:
    kind = value.WhichOneof("value")
    match kind:
        case None:
            return "()"
        case "list":
            return f"[{', '.join(_elements(value.list, functions))}]"
        case _:
            return _scalar(kind, getattr(value, kind), functions)


def _elements(values: Any, functions: _Functions) -> list[str]:
    """Returns the elements of a list attribute; colocation classes are sorted, since their order is meaningless."""
    for field, values_of_field in values.ListFields():
        shown = [_scalar(field.name, one, functions) for one in values_of_field]
        return sorted(shown) if any(one.startswith("'loc:@") for one in shown) else shown
    return []


def _scalar(kind: str, value: Any, functions: _Functions) -> str:
    match kind:
        case "type":
            return _type(value)
        case "shape":
            return _shape(value)
        case "tensor":
            return _constant(value)
        case "func":
            attributes = [f"{key}={_attribute(one, functions)}" for key, one in sorted(value.attr.items())]
            return functions.name(value.name) + (f"[{', '.join(attributes)}]" if attributes else "")
        case "s":
            return _string(value)
        case _:
            return str(value)


def _string(value: bytes) -> str:
    """Returns a long string, which holds a serialised message, as a hash."""
    return repr(value)[1:] if len(value) <= 200 else f"{len(value)} bytes {_hash(value)}"


def _type(value: int) -> str:
    return tf.as_dtype(value).name


def _shape(value: Any) -> str:
    return "?" if value.unknown_rank else f"[{', '.join('?' if d.size < 0 else str(d.size) for d in value.dim)}]"


def _constant(value: Any) -> str:
    shown = _type(value.dtype) + _shape(value.tensor_shape)
    if tf.as_dtype(value.dtype) in (tf.variant, tf.resource):
        return f"{shown} {_hash(value.SerializeToString(deterministic=True))}"
    array = tf.make_ndarray(value)
    if array.size <= _SHOWN_ELEMENTS:
        return f"{shown} {', '.join(_element(one) for one in array.ravel())}".rstrip()
    content = repr(array.tolist()).encode() if array.dtype == object else np.ascontiguousarray(array).tobytes()
    return f"{shown} {_hash(content)}"


def _element(value: Any) -> str:
    if isinstance(value, bytes):
        return _string(value)
    return repr(value.item() if isinstance(value, np.generic) and value.dtype.kind in "biufc" else value)


def _hash(content: bytes) -> str:
    return f"sha256 {hashlib.sha256(content).hexdigest()[:16]}"
