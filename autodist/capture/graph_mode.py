"""Front end for TensorFlow 1: captures the fetches of a session as a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import tensorflow as tf

from autodist.capture.assemble import (
    CaptureNotes,
    FoundVariable,
    ScriptVariable,
    assemble,
    describe_variables,
    note_specs,
)
from autodist.capture.gradients import RecordedGradientCall, tensors_of
from autodist.capture.in_step_all_reduces import RecordedAllReduce
from autodist.capture.keras.distribution.requested import requested_in_graph
from autodist.errors import CaptureError
from autodist.graph.devices import of_no_task
from autodist.graph.editor import GraphEditor, NodeDef
from autodist.graph.effects import READS, group_by_handle
from autodist.graph.index import GraphIndex
from autodist.graph.names import node_of
from autodist.graph.ops import Trait, having
from autodist.graph.parts import Variable
from autodist.graph.step import CapturedStep
from autodist.sharding import Annotations


@dataclass(frozen=True)
class NodeVariable:
    """A variable that is in no collection, described by its node."""

    name: str
    shape: tf.TensorShape
    dtype: tf.DType
    trainable: bool = False
    aggregation: tf.VariableAggregation = tf.VariableAggregation.NONE


@dataclass(frozen=True)
class CapturedGraph:
    """A graph as it was when its session was created.

    Attributes:
        graph: the script's graph.
        calls: the calls of `gradient` in the graph.
        variables: all variables.
        sums: the in-step all-reduces.
        order: additional control dependencies: the operations that run before an operation, by its name.
        sources: the variables of the script, by name.
    """

    graph: tf.Graph
    calls: tuple[RecordedGradientCall, ...]
    variables: tuple[Variable, ...]
    sums: tuple[RecordedAllReduce, ...] = ()
    order: Mapping[str, Sequence[str]] = field(default_factory=dict)
    sources: Mapping[str, ScriptVariable] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        graph: tf.Graph,
        calls: Iterable[RecordedGradientCall],
        sums: Iterable[RecordedAllReduce] = (),
        order: Mapping[str, Sequence[str]] | None = None,
    ) -> CapturedGraph:
        """Captures a graph.

        Raises:
            CaptureError: gradients were computed in several graphs, or replicas cannot share a variable.
        """
        calls = tuple(calls)
        if any(c.graph is not graph for c in calls):
            raise CaptureError(
                "gradients were made in two graphs within one scope, and one scope trains one graph. Open a scope for "
                "each graph."
            )
        found = find_variables(graph)
        variables = describe_variables(found)
        sources = {variable.name: one.source for variable, one in zip(variables, found, strict=True)}
        return cls(graph, calls, variables, tuple(sums), order or {}, sources)

    def require_same_training(self, calls: Sequence[RecordedGradientCall]) -> None:
        """Checks that additions to the graph since its session was created do not change the training.

        Initializers, summaries and the like may be added.

        Args:
            calls: all calls of `gradient` noted so far.

        Raises:
            CaptureError: variables or gradients were added.
        """
        known = {v.handle for v in self.variables}
        added = [op.name for op in self.graph.get_operations() if op.type == "VarHandleOp" and op.name not in known]
        added += [c.seed.op.name for c in calls[len(self.calls) :] if c.pairs]
        if added:
            raise CaptureError(
                f"the graph was changed after its session was made: {added[0]} was added. Build all variables and "
                "gradients before create_distributed_session(), so that they are part of the plan."
            )

    def whole(self) -> CapturedStep:
        """Returns the CapturedStep of the whole graph, from which the strategy is planned; cached.

        Raises:
            StrategyError: the distribution of Keras that is set does not fit the run or the variables.
        """
        return self._whole

    @cached_property
    def _whole(self) -> CapturedStep:
        definition = self._editor().to_graph_def()
        present = {node.name for node in definition.node}
        calls = [c for c in self.calls if c.seed.op.name in present]
        step = assemble(self._notes(calls, {}), definition, self.variables, {}, [], [])
        trained = {gradient.variable for gradient in step.gradients}
        return replace(step, annotations=requested_in_graph(self.sources, trained))

    @cached_property
    def _applied(self) -> dict[str, str]:
        """The variables to which the graph's gradients are applied, by the last tensor of the gradient."""
        return {g.tensors[-1]: g.variable for g in self._whole.gradients}

    def step(
        self,
        outputs: Sequence[str],
        targets: Sequence[str],
        inputs: Mapping[str, int | None],
        ranks: Mapping[str, int] | None = None,
    ) -> CapturedStep:
        """Returns the CapturedStep that a session runs for `outputs` and `targets`.

        Args:
            outputs: names of tensors.
            targets: names of operations.
            inputs: names of fed tensors, with the axis along which each is split; None: not split. A fed output of a
                node with several outputs gets a new name in the result, whose `inputs` have the same order.
            ranks: ranks of fed tensors whose rank is unknown in the graph.
        """
        editor = self._editor()
        fed = {name: replace_by_placeholder(editor, self.graph.get_tensor_by_name(name)) for name in inputs}
        for name, rank in (ranks or {}).items():
            editor[node_of(fed[name])].attr["shape"].shape.CopyFrom(tf.TensorShape([None] * rank).as_proto())
        outputs = [fed.get(name, name) for name in outputs]
        roots = [*map(node_of, outputs), *targets, *map(node_of, fed.values())]
        needed = editor.ancestors(roots)
        calls = [c for c in self.calls if _is_used(c, needed)]
        roots += [t.op.name for c in calls for t in c.forward_tensors]
        roots += self._trained_by(needed)
        editor.prune(roots)
        read_before_writing(editor, map(node_of, outputs))
        variables = [v for v in self.variables if v.handle in editor]
        notes = self._notes(calls, {node_of(new): name for name, new in fed.items()}, self._applied)
        axes = {fed[name]: axis for name, axis in inputs.items()}
        step = assemble(notes, editor.to_graph_def(), variables, axes, outputs, targets)
        step = replace(step, annotations=self._annotations_of(variables))
        return replace(step, noted=_inferred_specs(step)) if ranks else step

    def _annotations_of(self, variables: Iterable[Variable]) -> Annotations | None:
        """Returns the shardings that the script requests for some of the variables."""
        found, names = self._whole.annotations, {variable.name for variable in variables}
        if found is None:
            return None
        return replace(found, variables={name: one for name, one in found.variables.items() if name in names})

    def _trained_by(self, needed: set[str]) -> list[str]:
        """Returns the handles of the variables to which this run or a later one applies the run's gradients."""
        handles = {v.name: v.handle for v in self.variables}
        return [handles[variable] for name, variable in self._applied.items() if node_of(name) in needed]

    def step_of_nodes(self, outputs: Mapping[str, NodeDef], handles: Iterable[str]) -> CapturedStep:
        """Returns the step of additional nodes; each computes a Boolean scalar from the handle of a variable.

        Args:
            outputs: the nodes, by the name of the tensor that each returns.
            handles: handles of the variables that the nodes take.
        """
        editor = self._editor()
        editor.prune(handles)
        for node in outputs.values():
            editor.add(node)
        variables = [v for v in self.variables if v.handle in editor]
        return CapturedStep(
            editor.to_graph_def(), tuple(variables), outputs=tuple(outputs),
            noted={name: tf.TensorSpec([], tf.bool) for name in outputs}.__getitem__,
        )  # fmt: skip

    def _editor(self) -> GraphEditor:
        editor = GraphEditor(of_no_task(self.graph.as_graph_def()))
        for name, before in self.order.items():
            editor.add_control(name, before)
        return editor

    def _notes(
        self,
        calls: Sequence[RecordedGradientCall],
        placeholders: Mapping[str, str],
        applied: Mapping[str, str] | None = None,
    ) -> CaptureNotes:
        return CaptureNotes(self.graph, calls, handle_name, placeholders, sums=self.sums, applied=applied)


def find_variables(graph: tf.Graph) -> list[FoundVariable[ScriptVariable]]:
    """Returns the variables of a graph in the order of their nodes.

    Raises:
        CaptureError: a variable is a reference variable.
    """
    listed: dict[str, ScriptVariable] = dict(_listed(graph))
    found = []
    for op in graph.get_operations():
        if op.type in having(Trait.REFERENCE):
            raise CaptureError(
                f"{op.name} is a reference variable, which cannot be shared between replicas. Call "
                "tf.compat.v1.enable_resource_variables() before it is made, or make it within the scope."
            )
        if op.type == "VarHandleOp":
            shape = tf.TensorShape(op.get_attr("shape"))
            source = listed[op.name] if op.name in listed else NodeVariable(op.name, shape, op.get_attr("dtype"))
            found.append(FoundVariable(source, op.name))
    return found


def initializers_of(graph: tf.Graph) -> dict[str, str]:
    """Returns the initializer operations of the variables in collections, by handle."""
    found = {}
    for handle, member in _listed(graph).items():
        initializer = getattr(member, "initializer", None)
        if isinstance(initializer, tf.Operation):
            found[handle] = initializer.name
    return found


def _listed(graph: tf.Graph) -> dict[str, tf.Variable]:
    """Returns the variables in collections, by handle."""
    listed: dict[str, tf.Variable] = {}
    for name in graph.get_all_collection_keys():
        for member in graph.get_collection_ref(name):
            handle = getattr(member, "handle", None)
            if isinstance(member, tf.Variable) and isinstance(handle, tf.Tensor):
                listed.setdefault(handle.op.name, member)
    return listed


def handle_name(handle: Any) -> str | None:
    """Returns the node of a variable's handle, or None if it is no tensor of a graph."""
    return handle.op.name if isinstance(handle, tf.Tensor) else None


def _inferred_specs(step: CapturedStep) -> Callable[[str], tf.TensorSpec]:
    """Returns the static shapes that TensorFlow infers with the additional ranks of fed tensors."""
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(step.graph_def, name="")
    return note_specs(graph, [node.name for node in step.graph_def.node])


def _is_used(call: RecordedGradientCall, needed: set[str]) -> bool:
    made = {tensors_of(gradient)[-1].op.name for _, gradient in call.pairs}
    return call.seed.op.name in needed and (not made or not needed.isdisjoint(made))


def replace_by_placeholder(editor: GraphEditor, tensor: tf.Tensor) -> str:
    """Replaces a fed tensor by a placeholder and returns the placeholder's name."""
    node = editor[tensor.op.name]
    if node.op == "Placeholder":
        return tensor.name
    fed = NodeDef(name=node.name, op="Placeholder")
    fed.attr["dtype"].type = tensor.dtype.as_datatype_enum
    fed.attr["shape"].shape.CopyFrom(tensor.shape.as_proto())
    if len(tensor.op.outputs) > 1:
        fed.name = f"{node.name}/output_{tensor.value_index}"
        editor.add(fed)
        editor.rewire(tensor.name, f"{fed.name}:0")
        editor.replace_control(node.name, [fed.name])
        return f"{fed.name}:0"
    consumers = editor.consumers(node.name)
    inputs = {c: list(editor[c].input) for c in consumers}
    editor.remove([node.name])
    editor.add(fed)
    for consumer, spelled in inputs.items():
        editor.set_inputs(consumer, spelled)
    return tensor.name


def read_before_writing(editor: GraphEditor, roots: Iterable[str]) -> None:
    """Orders reads that are only fetched before the writes of the same run, unless the script orders them otherwise.

    In TensorFlow a read without inputs usually runs first, but not always. Two workers could then return the values
    of two different steps.
    """
    effects = GraphIndex(editor.to_graph_def()).effects
    writers = group_by_handle((name, effect.writes) for name, effect in effects.items())
    if not writers:
        return
    before_writes = editor.ancestors([name for names in writers.values() for name in names])
    for name in sorted(editor.ancestors(roots) - before_writes):
        if editor[name].op in READS and node_of(editor[name].input[0]) in writers:  # not in a function
            earlier = editor.ancestors([name])
            for writer in writers[node_of(editor[name].input[0])]:
                if writer not in earlier:
                    editor.add_control(writer, [name])
