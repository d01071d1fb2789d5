"""Assembles a CapturedStep from a graph and the notes made while it was built."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import tensorflow as tf

from autodist.capture.gradients import RecordedGradientCall, tensors_of
from autodist.capture.in_step_all_reduces import RecordedAllReduce
from autodist.capture.stage_marks import stage_of_variable
from autodist.errors import CaptureError
from autodist.graph.applied import find_applied
from autodist.graph.find_stages import find_stages
from autodist.graph.jit_scope import without_jit_scope
from autodist.graph.names import node_of
from autodist.graph.ops import Trait, having
from autodist.graph.origins import note_origins
from autodist.graph.parts import Aggregation, GradientCall, Term, Variable, VariableGradient
from autodist.graph.step import CapturedStep
from autodist.logs.terminal import ALIKE_EVERYWHERE

log = logging.getLogger("autodist")

_SEED_SUFFIXES = ("seed_generator_state", "StateVar")

_AGGREGATIONS = {
    "MEAN": Aggregation.MEAN,
    "SUM": Aggregation.SUM,
    "ONLY_FIRST_REPLICA": Aggregation.ONLY_FIRST_REPLICA,
}


class ScriptVariable(Protocol):
    """The properties of a script's variable that a CapturedStep needs; `tf.Variable` has them."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tf.TensorShape: ...

    @property
    def dtype(self) -> tf.DType: ...

    @property
    def trainable(self) -> bool: ...

    @property
    def aggregation(self) -> tf.VariableAggregation: ...


V = TypeVar("V", bound=ScriptVariable)


@dataclass(frozen=True)
class FoundVariable(Generic[V]):
    """A variable of the script, and the node of its handle in the captured graph."""

    source: V
    handle: str


@dataclass(frozen=True)
class CaptureNotes:
    """Notes made about a graph while it was built.

    Attributes:
        graph: source of shapes and dtypes.
        calls: the calls of `gradient` in the graph.
        handle_of: returns the name of the VarHandleOp of a noted handle, or None if it is not in this graph.
        placeholders: the tensor of the graph that each placeholder of the step stands for, by the placeholder's name.
        overwritten: handles of variables whose "gradients" are their new values.
        sums: the in-step all-reduces.
        applied: the variable to which each gradient is applied in the planned graph, by the gradient's last tensor. Set
            for one run of that graph; None for the planned graph itself.
    """

    graph: tf.Graph
    calls: Sequence[RecordedGradientCall]
    handle_of: Callable[[Any], str | None]
    placeholders: Mapping[str, str] = field(default_factory=dict)
    overwritten: frozenset[str] = frozenset()
    sums: Sequence[RecordedAllReduce] = ()
    applied: Mapping[str, str] | None = None


def describe_variables(found: Iterable[FoundVariable[V]]) -> tuple[Variable, ...]:
    """Returns a `Variable` for each variable found; duplicate names get a suffix, in the order of `found`.

    Raises:
        CaptureError: a shape is not fully known.
    """
    taken: dict[str, int] = {}
    described = []
    for one in found:
        source = one.source
        name = without_jit_scope(source.name.removesuffix(":0"))
        count = taken[name] = taken.get(name, 0) + 1
        unique = name if count == 1 else f"{name}_{count - 1}"
        if not source.shape.is_fully_defined():
            raise CaptureError(
                f"variable {unique} has shape {source.shape}, which is not fully known; create it with a fully known "
                "shape."
            )
        described.append(
            Variable(
                name=unique,
                handle=one.handle,
                shape=tuple(source.shape.as_list()),
                dtype=source.dtype.base_dtype,
                trainable=bool(source.trainable),
                aggregation=_AGGREGATIONS.get(source.aggregation.name, Aggregation.NONE),
                is_seed=source.dtype.is_integer and name.endswith(_SEED_SUFFIXES),
                stage=stage_of_variable(source),
            )
        )
    return tuple(described)


def assemble(
    notes: CaptureNotes,
    graph_def: tf.compat.v1.GraphDef,
    variables: Sequence[Variable],
    inputs: Mapping[str, int | None],
    outputs: Sequence[str],
    targets: Sequence[str],
) -> CapturedStep:
    """Returns the CapturedStep of a captured graph.

    Args:
        notes: the notes made while the graph was built.
        graph_def: the captured nodes, with a VarHandleOp for each variable.
        variables: all variables.
        inputs: tensors that are fed in each step, with their batch axes.
        outputs: tensors that the step returns.
        targets: nodes that run and return nothing.
    """
    names = {v.handle: v.name for v in variables}
    present = {node.name for node in graph_def.node}
    gradients: list[VariableGradient] = []
    made: list[GradientCall] = []
    for call in notes.calls:
        kept = [
            VariableGradient(names[handle], tensors, len(made))
            for source, gradient in call.pairs
            if (handle := notes.handle_of(source)) in names
            and handle not in notes.overwritten and (tensors := tuple(t.name for t in tensors_of(gradient)))
            and all(t.partition(":")[0] in present for t in tensors)
        ]  # fmt: skip
        if kept or call.seed.op.name in present:
            gradients += kept
            terms = tuple(
                Term(s.tensor.name, s.seed.op.name, s.value.op.name, s.parts) for s in call.decomposition_points
            )
            made.append(GradientCall(tuple(t.name for t in call.targets), call.seed.op.name, terms))
    step = CapturedStep(
        graph_def=graph_def,
        variables=tuple(replace(v, is_overwritten=v.handle in notes.overwritten) for v in variables),
        gradients=tuple(gradients),
        gradient_calls=tuple(made),
        in_step_all_reduces=tuple(
            s.all_reduce for s in notes.sums if s.graph is notes.graph and s.all_reduce.node in present
        ),
        inputs=dict(inputs),
        outputs=tuple(outputs),
        targets=tuple(targets),
        noted=note_specs(notes.graph, present, notes.placeholders),
    )
    step = _with_applied(step, notes.applied) if gradients else step
    writes = (name for name, effect in step.graph_index.effects.items() if effect.writes)
    return replace(step, origin_of=note_origins(notes.graph, [*step.named, *writes, *_takes_rows(step)]))


def _takes_rows(step: CapturedStep) -> list[str]:
    """Returns the nodes that may select rows by constants, except those that act on shapes."""
    of_shapes = having(Trait.OF_SHAPES)
    nodes = (
        step.graph_index.nodes[name]
        for name in step.graph_index.order
        if step.graph_index.nodes[name].op in having(Trait.PICKS)
    )
    return [
        node.name for node in nodes if not {step.graph_index.nodes[node_of(i)].op for i in node.input[:1]} & of_shapes
    ]


def _with_applied(step: CapturedStep, applied: Mapping[str, str] | None) -> CapturedStep:
    """Returns the step with its synchronized gradients, each assigned to the variable that it is applied to."""
    if applied is None:
        return replace(step, gradients=find_applied(step, find_stages(step)))
    planned = (replace(g, variable=applied[t]) for g in step.gradients if (t := g.tensors[-1]) in applied)
    step = replace(step, gradients=tuple(planned))
    return replace(step, gradients=find_stages(step).gradients)


def warn_of_variables_without_gradient(step: CapturedStep, notes: CaptureNotes) -> None:
    """Logs the variables that were differentiated by but do not affect the loss."""
    by_handle = step.by_handle
    lost = {by_handle[h].name for c in notes.calls for s in c.without if (h := notes.handle_of(s)) in by_handle}
    lost -= {g.variable for g in step.gradients}
    if lost:
        log.warning(
            "the loss does not depend on %s; without a gradient they are not synchronised and keep their values.",
            ", ".join(sorted(lost)), extra=ALIKE_EVERYWHERE,
        )  # fmt: skip


def note_specs(
    graph: tf.Graph, nodes: Iterable[str], placeholders: Mapping[str, str] | None = None
) -> Callable[[str], tf.TensorSpec]:
    """Returns a function from a tensor's name to its static shape and dtype, for the outputs of `nodes`.

    The Python objects of a graph take several times the memory of its definition. The returned function refers to none
    of them, so that a traced graph is freed after its capture.

    Args:
        graph: the graph of the nodes.
        nodes: names of nodes.
        placeholders: nodes that are not in the graph, with the tensors that they stand for.

    Raises:
        KeyError: raised by the returned function for an unknown tensor.
    """
    alike: dict[tuple[object, tf.DType], tf.TensorSpec] = {}

    def spec(tensor: tf.Tensor) -> tf.TensorSpec:
        shape = tensor.shape
        key = (None if shape.rank is None else tuple(shape.as_list()), tensor.dtype)
        return alike.setdefault(key, tf.TensorSpec(shape, tensor.dtype))

    stand_for = placeholders or {}

    def outputs(name: str) -> Sequence[tf.Tensor]:
        if name in stand_for:
            return (graph.get_tensor_by_name(stand_for[name]),)
        return graph.get_operation_by_name(name).outputs

    return {f"{name}:{k}": spec(made) for name in nodes for k, made in enumerate(outputs(name))}.__getitem__
