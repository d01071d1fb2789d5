"""Front end of TensorFlow 1 scripts: what a session is asked to run, out of a graph, becomes a Step."""

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
from autodist.capture.fetched_reads import read_before_writing
from autodist.capture.gradients import NotedCall
from autodist.capture.in_step_all_reduces import NotedAllReduce
from autodist.errors import CaptureError
from autodist.graph.devices import of_no_task
from autodist.graph.editor import GraphEditor, NodeDef
from autodist.graph.names import node_of
from autodist.graph.ops import Trait, having
from autodist.graph.parts import Variable
from autodist.graph.step import Step


@dataclass(frozen=True)
class NodeVariable:
    """A variable that stands in no collection, known by its node alone."""

    name: str
    shape: tf.TensorShape
    dtype: tf.DType
    trainable: bool = False
    aggregation: tf.VariableAggregation = tf.VariableAggregation.NONE


@dataclass(frozen=True)
class CapturedGraph:
    """A graph as it was when its session was made.

    Attributes:
        graph: of the script.
        calls: the calls of `gradient` that were noted in it.
        variables: all of its variables.
        sums: what is added up over replicas in it.
        order: for operations, by name, those that run before them besides what the graph says.
    """

    graph: tf.Graph
    calls: tuple[NotedCall, ...]
    variables: tuple[Variable, ...]
    sums: tuple[NotedAllReduce, ...] = ()
    order: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        graph: tf.Graph,
        calls: Iterable[NotedCall],
        sums: Iterable[NotedAllReduce] = (),
        order: Mapping[str, Sequence[str]] | None = None,
    ) -> CapturedGraph:
        """Looks at a graph.

        Raises:
            CaptureError: gradients were made in another graph too, or variables are of the kind that AutoDist cannot
                share.
        """
        calls = tuple(calls)
        if any(c.graph is not graph for c in calls):
            raise CaptureError(
                "gradients were made in two graphs within one scope; which is to be trained? Open a scope for each "
                "graph."
            )
        found = find_variables(graph)
        return cls(graph, calls, describe_variables(found), tuple(sums), order or {})

    def require_same_training(self, calls: Sequence[NotedCall]) -> None:
        """Passes if what was added to the graph since its session was made changes nothing of what is trained.

        Args:
            calls: all calls of `gradient` that were noted by now.

        Raises:
            CaptureError: variables or gradients were added; initialisers, summaries and the like may be.
        """
        known = {v.handle for v in self.variables}
        added = [op.name for op in self.graph.get_operations() if op.type == "VarHandleOp" and op.name not in known]
        added += [c.seed.op.name for c in calls[len(self.calls) :] if c.pairs]
        if added:
            raise CaptureError(
                f"the graph was changed after its session was made: {added[0]} was added. Build all variables and "
                "gradients before create_distributed_session(), so that they are part of the plan."
            )

    def whole(self) -> Step:
        """All of the graph, for planning, as it was when this was first asked."""
        return self._whole

    @cached_property
    def _whole(self) -> Step:
        definition = self._editor().to_graph_def()
        present = {node.name for node in definition.node}
        calls = [c for c in self.calls if c.seed.op.name in present]
        return assemble(self._notes(calls, {}), definition, self.variables, {}, [], [])

    @cached_property
    def _applied(self) -> dict[str, str]:
        """The variables that the gradients of the whole graph are applied to, by their last tensors."""
        return {g.tensors[-1]: g.variable for g in self._whole.gradients}

    def step(
        self,
        outputs: Sequence[str],
        targets: Sequence[str],
        inputs: Mapping[str, int | None],
        ranks: Mapping[str, int] | None = None,
    ) -> Step:
        """What runs when a session is asked for `outputs` and `targets`, given `inputs`.

        Args:
            outputs: tensors.
            targets: operations.
            inputs: fed tensors, with the axis along which each is split. One of several outputs of a node gets a name
                of its own; `inputs` of what is returned stand in the same order.
            ranks: of fed tensors of which the graph does not say how many axes they have.
        """
        editor = self._editor()
        fed = {name: become_fed(editor, self.graph.get_tensor_by_name(name)) for name in inputs}
        for name, rank in (ranks or {}).items():
            editor[node_of(fed[name])].attr["shape"].shape.CopyFrom(tf.TensorShape([None] * rank).as_proto())
        outputs = [fed.get(name, name) for name in outputs]
        roots = [*map(node_of, outputs), *targets, *map(node_of, fed.values())]
        needed = editor.ancestors(roots)
        calls = [c for c in self.calls if _is_used(c, needed)]
        roots += [node_of(t.name) for c in calls for t in noted_tensors(c)]
        roots += self._trained_by(needed)
        editor.prune(roots)
        read_before_writing(editor, map(node_of, outputs))
        variables = [v for v in self.variables if v.handle in editor]
        notes = self._notes(calls, {node_of(new): name for name, new in fed.items()}, self._applied)
        axes = {fed[name]: axis for name, axis in inputs.items()}
        item = assemble(notes, editor.to_graph_def(), variables, axes, outputs, targets)
        return replace(item, noted=_inferred_specs(item)) if ranks else item

    def _trained_by(self, needed: set[str]) -> list[str]:
        """The handles of the variables that a run's gradients are applied to, be that part of the run or not."""
        handles = {v.name: v.handle for v in self.variables}
        return [handles[variable] for name, variable in self._applied.items() if node_of(name) in needed]

    def having(self, outputs: Mapping[str, NodeDef], handles: Iterable[str]) -> Step:
        """A run of nodes that the script has not built: each gives a Boolean scalar and takes a variable's handle.

        Args:
            outputs: a node for each tensor that is returned.
            handles: of the variables that they take.
        """
        editor = self._editor()
        editor.prune(handles)
        for node in outputs.values():
            editor.add(node)
        variables = [v for v in self.variables if v.handle in editor]
        return Step(
            editor.to_graph_def(), tuple(variables), outputs=tuple(outputs),
            noted={name: tf.TensorSpec([], tf.bool) for name in outputs}.__getitem__,
        )  # fmt: skip

    def _editor(self) -> GraphEditor:
        editor = GraphEditor(of_no_task(self.graph.as_graph_def()))
        for name, before in self.order.items():
            editor.add_control(name, before)
        return editor

    def _notes(
        self, calls: Sequence[NotedCall], placeholders: Mapping[str, str], applied: Mapping[str, str] | None = None
    ) -> CaptureNotes:
        return CaptureNotes(self.graph, calls, handle_name, placeholders, sums=self.sums, applied=applied)


def find_variables(graph: tf.Graph) -> list[FoundVariable[ScriptVariable]]:
    """The variables of a graph, in the order of their nodes.

    Raises:
        CaptureError: if one is a reference variable.
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
    """For the handles of variables that stand in a collection, what sets them to their initial values."""
    found = {}
    for handle, member in _listed(graph).items():
        initializer = getattr(member, "initializer", None)
        if isinstance(initializer, tf.Operation):
            found[handle] = initializer.name
    return found


def _listed(graph: tf.Graph) -> dict[str, tf.Variable]:
    """The variables that stand in a collection, by handle."""
    listed: dict[str, tf.Variable] = {}
    for name in graph.get_all_collection_keys():
        for member in graph.get_collection_ref(name):
            handle = getattr(member, "handle", None)
            if isinstance(member, tf.Variable) and isinstance(handle, tf.Tensor):
                listed.setdefault(handle.op.name, member)
    return listed


def handle_name(handle: Any) -> str | None:
    """The node of a variable's handle, as it was noted; None for what is no handle of a graph."""
    return handle.op.name if isinstance(handle, tf.Tensor) else None


def noted_tensors(call: NotedCall) -> list[tf.Tensor]:
    """What a call was given, and its seed."""
    return [call.seed, *call.targets]


def noted_nodes(gradient: tf.Tensor | tf.IndexedSlices) -> list[str]:
    """The nodes that make a gradient's values."""
    return [(gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient).op.name]


def _inferred_specs(item: Step) -> Callable[[str], tf.TensorSpec]:
    """Static shapes as TensorFlow finds them now that more is known of what is fed."""
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(item.graph_def, name="")
    return note_specs(graph, [node.name for node in item.graph_def.node])


def _is_used(call: NotedCall, needed: set[str]) -> bool:
    if not call.pairs:
        return call.seed.op.name in needed
    made = [name for _, gradient in call.pairs for name in noted_nodes(gradient)]
    return call.seed.op.name in needed and not needed.isdisjoint(made)


def become_fed(editor: GraphEditor, tensor: tf.Tensor) -> str:
    """A fed tensor is a placeholder, whatever makes it in the script's graph; returns its name."""
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
