"""`ad.function` while a graph is built: the step becomes part of the graph, and a distributed session runs it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.util import nest  # its flatten functions return paths

from autodist.capture.gradients import GradientNotes
from autodist.capture.graph_mode import CapturedGraph, initializers_of
from autodist.capture.in_step_all_reduces import AllReduceNotes
from autodist.errors import CaptureError
from autodist.functions.tracing import constant_key
from autodist.graph.editor import GraphEditor
from autodist.graph.index import GraphIndex
from autodist.graph.names import node_of
from autodist.graph.ops import Trait, having
from autodist.graph.walks import reach
from autodist.runs.run import Run
from autodist.sessions.session import DistributedSession
from autodist.tf_compat.tf1_scripts import plain_shapes

v1 = tf.compat.v1

Axis = Callable[[str, Sequence[Any], Any], int | None]
"""Returns the batch axis of an array, from its parameter, its path in the argument, and the array."""

_ArgumentPlace = tuple[str, Sequence[Any]]
"""A parameter, and the path of an array in its argument."""


@dataclass
class _Known:
    """State of one graph: the write order of the functions added so far, and the latest session of the graph."""

    order: dict[str, Sequence[str]] = field(default_factory=dict)
    session: DistributedSession | None = None


class GraphSessions:
    """Makes sessions for functions called while graphs are built; those of one graph share its values.

    Args:
        run: the run.
        notes: returns the calls recorded in the scope; None outside of a scope.
    """

    def __init__(self, run: Run, notes: Callable[[], tuple[GradientNotes, AllReduceNotes] | None]) -> None:
        self._run, self._notes = run, notes
        self._known: weakref.WeakKeyDictionary[tf.Graph, _Known] = weakref.WeakKeyDictionary()

    def make(
        self, graph: tf.Graph, step: BuiltStep, batch_axis: Mapping[tf.Tensor, int | None], is_global: bool
    ) -> DistributedSession:
        """Returns a session that runs the step that was added to a graph.

        Args:
            graph: the graph.
            step: the step added last.
            batch_axis: batch axis of each placeholder.
            is_global: True if every worker feeds these placeholders with the same arrays.

        Raises:
            CaptureError: the step was added outside of the scope, or applies no gradient that it computes.
        """
        notes = self._notes()
        if notes is None:
            raise CaptureError(
                "the step is called in a graph and outside the scope; build and call it within "
                "`with tf.Graph().as_default(), ad.scope():`."
            )
        known = self._known.setdefault(graph, _Known())
        known.order.update(step.order)
        shared = frozenset(t.name for t in batch_axis) if is_global else frozenset()
        with plain_shapes():
            captured = CapturedGraph.of(graph, notes[0].calls, notes[1].sums, dict(known.order))
            known.session = DistributedSession(self._run, captured, None, batch_axis, shared, known.session)
        return known.session


@dataclass(frozen=True)
class _Ready:
    session: DistributedSession
    placeholders: Sequence[tf.Tensor]
    step: BuiltStep
    fetches: Sequence[Any]


class GraphFunction:
    """Runs a step in the graph in which it is called.

    Its first call adds the operations of the step to the graph, with a placeholder for each array; tensors of the graph
    stay unchanged. Each call is one run of a session.

    Args:
        name: name of the step.
        function: the step, called with its arguments by parameter.
        axis: returns the batch axis of each array.
        sessions: makes the session.
        is_global: True if every worker passes the same arrays and keeps its share.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[Mapping[str, Any]], Any],
        axis: Axis,
        sessions: GraphSessions,
        is_global: bool,
    ) -> None:
        self._name, self._function, self._axis = name, function, axis
        self._sessions, self._is_global = sessions, is_global
        self._ready: weakref.WeakKeyDictionary[tf.Graph, dict[Hashable, _Ready]] = weakref.WeakKeyDictionary()

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        """Runs the step in the default graph.

        Returns:
            The function's result: arrays for tensors and variables, None for operations.

        Raises:
            CaptureError: the step cannot be captured.
        """
        graph = v1.get_default_graph()
        leaves = [
            ((p, path), leaf) for p, value in arguments.items() for path, leaf in nest.flatten_with_tuple_paths(value)
        ]
        arrays = [(place, np.asarray(_numpy(leaf))) for place, leaf in leaves if _is_array(leaf)]
        places = [place for place, _ in arrays]
        specs = [self._spec(place, array) for place, array in arrays]
        key = (
            tuple((place, None if _is_array(leaf) else constant_key(leaf)) for place, leaf in leaves),
            tuple(map(str, specs)),
        )
        ready = self._ready.setdefault(graph, {})
        if key not in ready:
            ready[key] = self._build(graph, arguments, places, specs)
        return self._run(ready[key], [array for _, array in arrays])

    def _spec(self, place: _ArgumentPlace, array: np.ndarray) -> tf.TensorSpec:
        axis = self._axis(*place, array)
        return tf.TensorSpec([None if a == axis else n for a, n in enumerate(array.shape)], array.dtype)

    def _build(
        self,
        graph: tf.Graph,
        arguments: Mapping[str, Any],
        places: Sequence[_ArgumentPlace],
        specs: Sequence[tf.TensorSpec],
    ) -> _Ready:
        placeholders = [v1.placeholder(s.dtype, s.shape, place[0]) for s, place in zip(specs, places, strict=True)]
        remaining = iter(placeholders)
        given = {
            name: tf.nest.map_structure(lambda v: next(remaining) if _is_array(v) else v, value)
            for name, value in arguments.items()
        }
        step = build_step(graph, lambda: self._function(given))
        with plain_shapes():
            axes = {t: self._axis(*place, t) for t, place in zip(placeholders, places, strict=True) if t.shape.rank}
        fetches = [f for leaf in tf.nest.flatten(step.outputs) if (f := _fetch_of(leaf)) is not None]
        self._require_fed([graph.as_graph_element(f) for f in (*fetches, *step.effects)], placeholders)
        return _Ready(self._sessions.make(graph, step, axes, self._is_global), placeholders, step, fetches)

    def _require_fed(self, run: Sequence[tf.Tensor | tf.Operation], placeholders: Sequence[tf.Tensor]) -> None:
        """Checks that a call feeds every placeholder that the step depends on.

        Raises:
            CaptureError: a placeholder of the script is not fed.
        """
        fed = {t.op for t in placeholders}
        needed = reach(
            [one.op if isinstance(one, tf.Tensor) else one for one in run],
            lambda op: () if op in fed else [*(t.op for t in op.inputs), *op.control_inputs],
        )
        for name in sorted(op.name for op in needed - fed if op.type == "Placeholder"):
            raise CaptureError(
                f"{self._name} computes from {name}, a placeholder, and a call feeds its arguments only. "
                "Call it with the arrays themselves, or build the graph without ad.function and feed the "
                "placeholder to session.run of ad.create_distributed_session()."
            )

    def _run(self, ready: _Ready, arrays: Sequence[np.ndarray]) -> Any:
        fed = dict(zip(ready.placeholders, arrays, strict=True))
        values = iter(ready.session.run([list(ready.fetches), list(ready.step.effects)], fed)[0])
        return tf.nest.map_structure(
            lambda leaf: next(values) if _fetch_of(leaf) is not None else leaf, ready.step.outputs
        )


def _is_array(value: Any) -> bool:
    """Returns True if a value is fed: an array or an eager tensor."""
    return isinstance(value, np.ndarray | np.generic) or (isinstance(value, tf.Tensor) and hasattr(value, "numpy"))


def _numpy(value: Any) -> Any:
    return value.numpy() if isinstance(value, tf.Tensor) else value


def _fetch_of(leaf: Any) -> Any:
    """Returns the fetch for a leaf of a step's result; None for a Python value, which is returned unchanged."""
    if isinstance(leaf, tf.Tensor | tf.Operation | tf.Variable | tf.IndexedSlices | tf.SparseTensor):
        return leaf
    value = getattr(leaf, "value", None)  # a Keras 3 variable wraps a tf.Variable
    return value if isinstance(value, tf.Variable) else None


_TELLS, _ENTRANCES = having(Trait.PRINTS), having(Trait.ENTER | Trait.SWITCH)


@dataclass(frozen=True)
class BuiltStep:
    """The additions of one function call to a graph.

    Attributes:
        outputs: the function's return value.
        effects: operations that run with each call, returned or not: writes of variables, checks and prints.
        order: by an operation's name, the operations that run before it. Each variable is read and written in program
            order, as within a `tf.function`.
    """

    outputs: Any
    effects: tuple[tf.Operation, ...]
    order: Mapping[str, Sequence[str]]


def build_step(graph: tf.Graph, function: Callable[[], Any]) -> BuiltStep:
    """Calls a function that adds its operations to `graph`, the default graph."""
    known = len(graph.get_operations())
    outputs = function()
    made = graph.get_operations()[known:]
    graph_index = GraphIndex(graph.as_graph_def())
    # Initializers run before any step and wait for none.
    initial = GraphEditor(graph_index.graph_def, graph_index).ancestors(initializers_of(graph).values())
    own = [op for op in made if op.name not in initial]
    writes = [op for op in own if op.name in graph_index.effects and graph_index.effects[op.name].writes]
    checks = [op for op in own if op.type in _TELLS]
    effects = tuple(op for op in (*writes, *checks) if graph.is_fetchable(op))
    return BuiltStep(outputs, effects, _order(graph_index, [op.name for op in own]))


def _order(graph_index: GraphIndex, made: Collection[str]) -> dict[str, list[str]]:
    """Returns the control inputs with which each variable is read and written in the order of `made`."""
    order: dict[str, list[str]] = {}
    last_write: dict[str, str] = {}
    reads: dict[str, list[str]] = {}
    for name in made:
        effect = graph_index.effects.get(name)
        if effect is None or not _takes_handles(graph_index, name):
            continue
        before = [last_write[h] for h in sorted(effect.reads | effect.writes) if h in last_write]
        before += [read for h in sorted(effect.writes) for read in reads.pop(h, ())]
        if before:
            order[name] = list(dict.fromkeys(before))
        last_write.update(dict.fromkeys(effect.writes, name))
        for handle in effect.reads - effect.writes:
            reads.setdefault(handle, []).append(name)
    return order


def _takes_handles(graph_index: GraphIndex, name: str) -> bool:
    """Returns True if a node takes variables' handles directly, not through a loop or branch of TensorFlow 1."""
    sources = [graph_index.nodes[node_of(i)] for i in graph_index.nodes[name].input]
    return not any(source.op in _ENTRANCES for source in sources)
