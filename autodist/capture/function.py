"""Front end for TensorFlow 2: traces a Python function into a Step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function.polymorphic_function import OptionalXlaContext  # tf.function's own

from autodist.capture.assemble import (
    CaptureNotes,
    assemble,
    describe_variables,
    warn_of_variables_without_gradient,
)
from autodist.capture.captured_resources import Table, bind_captures, require_unchanged
from autodist.capture.composites import pairing_entries, reducing_by_rows
from autodist.capture.global_statistics import with_global_statistics
from autodist.capture.gradients import GradientNotes, forget_custom_gradients, recording_gradients, tensors_of
from autodist.capture.in_step_all_reduces import AllReduceNotes, recording_all_reduces
from autodist.capture.inline import inlining_functions, naming_captures
from autodist.capture.jacobians import keeping_records
from autodist.capture.keras.batch_norm import FusedNorms, fusing_batch_norms
from autodist.capture.keras.distribution.checks import checking_distributions
from autodist.capture.keras.distribution.requested import requested_shardings
from autodist.capture.other_strategies import refusing_strategies
from autodist.capture.trace_changes import TraceChanges
from autodist.capture.training_branches import find_training_branches
from autodist.capture.training_hooks import distributing
from autodist.capture.training_requirements import require_applied, require_synchronizable
from autodist.graph.devices import of_no_task
from autodist.graph.editor import GraphEditor
from autodist.graph.names import node_of, tensor
from autodist.graph.ops import Trait, having
from autodist.graph.step import CapturedStep
from autodist.tf_compat.patches import OPTIMIZER_OVERWRITE, patched


@dataclass(frozen=True)
class CapturedFunction:
    """A traced step.

    Attributes:
        step: the step.
        sources: the script's variables, in the order of `step.variables`.
        inputs: input tensors of the step, in the order of the flattened arguments.
        outputs: structure of the return value. Its leaves are Python values or `tf.TensorSpec`s, in the order of
            `step.outputs`.
        tables: lookup tables that the step reads.
    """

    step: CapturedStep
    sources: tuple[tf.Variable, ...]
    inputs: tuple[str, ...]
    outputs: Any
    tables: tuple[Table, ...] = ()


def capture_function(
    function: Callable[..., Any],
    arguments: Any,
    batch_axes: Iterable[int | None],
    jit_compile: bool = False,
    autograph: bool = True,
    is_split: bool = False,
    builds_for_xla: bool | None = None,
) -> CapturedFunction:
    """Traces `function(*arguments)`.

    Args:
        function: the step.
        arguments: a tuple whose tensors are `tf.TensorSpec`s.
        batch_axes: the axis along which each tensor of the flattened arguments is split.
        jit_compile: True if the script compiles the step with XLA.
        autograph: True if Python control flow is converted, as by `tf.function`.
        is_split: True if each replica gets a part of the batch, so that batch statistics in a loss are exchanged.
        builds_for_xla: True if loops are built in a form that XLA can compile; None: as `jit_compile`.

    Raises:
        CaptureError: the step computes gradients in a loop or does not apply them, or writes trainable variables from
            its batch without gradients; or it uses an outside resource that cannot be captured.
    """
    builds_for_xla = jit_compile if builds_for_xla is None else builds_for_xla
    trace = functools.partial(_trace, function, arguments, builds_for_xla, autograph)
    capture = functools.partial(_capture, trace, tuple(batch_axes))
    made = with_global_statistics(capture) if is_split else capture(TraceChanges())
    made = made.compiled(jit_compile, builds_for_xla)
    warn_of_variables_without_gradient(made.captured.step, made.notes)
    return made.captured


@dataclass(frozen=True)
class _Made:
    """A trace and the notes on its graph."""

    captured: CapturedFunction
    notes: CaptureNotes

    @property
    def step(self) -> CapturedStep:
        return self.captured.step

    def compiled(self, jit_compile: bool, builds_for_xla: bool) -> _Made:
        """Returns this trace with what is known about XLA."""
        step = replace(self.step, jit_compile=jit_compile, has_loops_for_xla=builds_for_xla)
        return replace(self, captured=replace(self.captured, step=step))

    @property
    def graph(self) -> tf.Graph:
        return self.notes.graph


def _capture(
    trace: Callable[..., tuple[Any, GradientNotes, AllReduceNotes]],
    batch_axes: Sequence[int | None],
    changes: TraceChanges,
) -> _Made:
    """Captures a trace.

    Args:
        trace: traces the step with some changes.
        batch_axes: as for `capture_function`.
        changes: the changes; conditionals that compute gradients are added, and the step is traced again with them.
    """
    with fusing_batch_norms() as norms, _recording_overwrites() as overwritten:
        concrete, noted, sums = trace(changes)
    if norms.are_differentiated_twice:
        norms = FusedNorms()  # fuses nothing: second derivatives are those of the script's own arithmetic
        concrete, noted, sums = trace(changes)
    if more := find_training_branches(concrete.graph, noted.calls) - changes.branches:
        changes.trace_branches(more)
        return _capture(trace, batch_axes, changes)
    return _made_of(concrete, noted, sums, norms, overwritten, batch_axes)


def _made_of(
    concrete: Any,
    noted: GradientNotes,
    sums: AllReduceNotes,
    norms: FusedNorms,
    overwritten: Iterable[Any],
    batch_axes: Sequence[int | None],
) -> _Made:
    """Builds the step of a trace.

    Args:
        concrete: the concrete function of the trace.
        noted: the calls of `gradient` in it.
        sums: its in-step all-reduces.
        norms: its batch normalisations.
        overwritten: the handles of variables that an optimizer overwrites with the "gradient".
        batch_axes: as for `capture_function`.
    """
    graph = concrete.graph
    calls = [c for c in noted.calls if c.graph is graph]
    require_synchronizable(noted.calls, calls)
    definition = of_no_task(graph.as_graph_def())
    forget_custom_gradients(definition)
    editor = GraphEditor(definition)
    norms.share_moments(editor, graph)
    found, tables = bind_captures(editor, graph)
    variables = describe_variables(found)
    handles = {id(one.source.handle): one.handle for one in found}

    def handle_of(source: Any) -> str | None:
        return handles.get(id(source)) or _inner_handle(graph, source, handles)

    inputs = [t.name for t in graph.inputs[: len(graph.inputs) - len(graph.captures)]]
    outputs = [_through_identities(editor, t.name) for t in concrete.outputs]
    targets = sorted(op.name for op in graph.control_outputs if op.type not in having(Trait.READ))
    tensors = [t for c in calls for t in (*c.forward_tensors, *(t for _, g in c.pairs for t in tensors_of(g)))]
    kept = [*map(node_of, (*outputs, *inputs)), *targets, *(t.op.name for t in tensors), *(v.handle for v in variables)]
    editor.prune(kept)
    handles_of_overwritten = frozenset(filter(None, map(handle_of, overwritten)))
    stand_for = {name: captured for name, (_, captured) in tables.items()}
    notes = CaptureNotes(graph, calls, handle_of, stand_for, handles_of_overwritten, sums=sums.sums)
    axes = dict(zip(inputs, batch_axes, strict=True))
    step = assemble(notes, editor.to_graph_def(), variables, axes, outputs, targets)
    trained = {gradient.variable for gradient in step.gradients}
    by_name = {variable.name: one.source for variable, one in zip(variables, found, strict=True)}
    step = replace(step, annotations=requested_shardings(step.graph_def, by_name, trained))
    require_unchanged(step.graph_def, "the step")
    require_applied(step, calls)
    returned = tf.nest.map_structure(_without_graph, concrete.structured_outputs)
    sources = tuple(one.source for one in found)
    tables_read = tuple(t for t, _ in tables.values())
    return _Made(CapturedFunction(step, sources, tuple(inputs), returned, tables_read), notes)


@contextmanager
def _recording_overwrites() -> Iterator[list[Any]]:
    """Yields the handles of variables that Keras's optimizers overwrite with the "gradient" meanwhile (float8)."""
    handles: list[Any] = []

    def overwrite(plain: Any, optimizer: keras.Optimizer, gradients: Iterable[Any], variables: Iterable[Any]) -> Any:
        variables = list(variables)
        handles.extend(v.value.handle for v in variables if getattr(v, "overwrite_with_gradient", False))
        return plain(optimizer, gradients, variables)

    with patched({OPTIMIZER_OVERWRITE: overwrite}):
        yield handles


def _without_graph(leaf: Any) -> Any:
    return tf.TensorSpec(leaf.shape, leaf.dtype) if isinstance(leaf, tf.Tensor) else leaf


def _trace(
    function: Callable[..., Any],
    arguments: Any,
    builds_for_xla: bool,
    autograph: bool,
    changes: TraceChanges,
    keeps_records: bool = False,
) -> tuple[Any, GradientNotes, AllReduceNotes]:
    """Returns the concrete function, its gradients and its in-step all-reduces."""
    with (
        keeping_records() if keeps_records else nullcontext(),
        recording_gradients() as noted,
        recording_all_reduces(in_functions=True) as sums,
        changes.applied(sums),
        inlining_functions(),
        reducing_by_rows(),
        pairing_entries(),
        naming_captures(),
        distributing() as warnings,
        refusing_strategies(),
        checking_distributions(),
        OptionalXlaContext(builds_for_xla),
    ):
        concrete = tf.function(function, autograph=autograph).get_concrete_function(*arguments)
    if noted.wants_records:
        return _trace(function, arguments, builds_for_xla, autograph, changes, keeps_records=True)
    if noted.calls:
        for warn in warnings:
            warn()
    return concrete, noted, sums


def _inner_handle(graph: tf.Graph, source: Any, handles: dict[int, str]) -> str | None:
    """Returns the node of the handle that a noted placeholder of the graph stands for."""
    for outer, inner in graph.captures:
        if inner is source:
            return handles.get(id(outer))
    return None


def _through_identities(editor: GraphEditor, name: str) -> str:
    """Returns an output without the Identity that orders it after all writes of the step."""
    node = editor[node_of(name)]
    while node.op == "Identity":
        name = tensor(node.input[0])
        node = editor[node_of(name)]
    return name
