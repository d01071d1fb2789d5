"""Graphs for propagation tests, and numerical checks: values of shards, combined by kind, against the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from autodist.layout import (
    Elements,
    Examples,
    Kind,
    Mean,
    PerExample,
    Propagation,
    Reduced,
    ReducedBy,
    Replicated,
    Scalar,
    Sum,
    Total,
    Unknown,
    Weight,
    propagate,
)

Feeds = Mapping[str, np.ndarray]
Values = Mapping[str, np.ndarray]


@dataclass
class Case:
    """A graph whose placeholders hold a batch along their first axis.

    Attributes:
        graph: the single-device graph.
        batch_axes: the split placeholders, with their axis.
        declared: declared kinds, by tensor name.
    """

    graph: tf.Graph = field(default_factory=tf.Graph)
    batch_axes: dict[str, int] = field(default_factory=dict)
    session: tf.compat.v1.Session | None = None
    declared: dict[str, Kind] = field(default_factory=dict)

    def batch(self, name: str, *shape: int | None, dtype: tf.DType = tf.float64, axis: int = 0) -> tf.Tensor:
        """Creates a split placeholder with an open batch axis."""
        lengths = [*shape[:axis], None, *shape[axis:]]
        self.batch_axes[f"{name}:0"] = axis
        return tf.compat.v1.placeholder(dtype, lengths, name=name)

    def propagation(self) -> Propagation:
        shapes = lambda name: self.graph.get_tensor_by_name(name).shape  # noqa: E731
        return propagate(self.graph.as_graph_def(), self.batch_axes, shapes, declared=self.declared)

    def kind(self, tensor: tf.Tensor) -> Kind:
        return self.propagation().kind(tensor.name)

    def run(self, names: Sequence[str], feeds: Feeds) -> Values:
        """Returns the values of some tensors."""
        if self.session is None:
            self.session = tf.compat.v1.Session(graph=self.graph)
            with self.graph.as_default():
                self.session.run(tf.compat.v1.global_variables_initializer())
        found = self.session.run(list(names), {f"{name}:0": value for name, value in feeds.items()})
        return {name: np.asarray(value) for name, value in zip(names, found, strict=True)}

    def parts(self, feeds: Feeds, sizes: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Returns the feeds of each replica."""
        ends = np.cumsum(sizes)
        cut = {}
        for name, value in feeds.items():
            axis = self.batch_axes.get(f"{name}:0")
            cut[name] = [value] * len(sizes) if axis is None else np.split(value, ends[:-1], axis)
        return [{name: pieces[index] for name, pieces in cut.items()} for index in range(len(sizes))]

    def assert_joins(
        self, tensors: Sequence[tf.Tensor], feeds: Feeds, sizes: Sequence[int], rtol: float = 1e-12
    ) -> list[Kind]:
        """Asserts that the replicas' values of tensors, combined by kind, equal the values for the whole batch.

        Skips tensors of unknown kind, and those in which examples of a shard interact.
        """
        propagation = self.propagation()
        kinds = [propagation.kind(tensor.name) for tensor in tensors]
        known = {t.name: kind for t, kind in zip(tensors, kinds, strict=True) if is_exact(kind)}
        weighed = {name for kind in known.values() if isinstance(kind, Mean) for name in _tensors_of(kind.weight)}
        names = sorted({*known, *weighed})
        whole = self.run(names, feeds)
        parts = [self.run(names, part) for part in self.parts(feeds, sizes)]
        for name, kind in known.items():
            joined = joined_values(kind, name, parts, sizes)
            assert joined.shape == whole[name].shape, (name, kind)
            np.testing.assert_allclose(joined, whole[name], rtol=rtol, atol=rtol, err_msg=f"{name}: {kind}")
        return kinds


def is_exact(kind: Kind) -> bool:
    """Returns True if a kind promises the exact value for the whole batch."""
    return (isinstance(kind, Reduced) or not isinstance(kind, Unknown)) and getattr(kind, "mixed_at", None) is None


_REDUCTIONS = {
    ReducedBy.MAX: np.max,
    ReducedBy.MIN: np.min,
    ReducedBy.PRODUCT: np.prod,
    ReducedBy.NORM: lambda values, axis: np.sqrt(np.sum(np.square(values), axis)),
}


def joined_values(kind: Kind, tensor: str, parts: Sequence[Values], sizes: Sequence[int]) -> np.ndarray:
    """Combines the replicas' values of a tensor by its kind."""
    values = [part[tensor] for part in parts]
    match kind:
        case Replicated():
            for value in values[1:]:
                np.testing.assert_array_equal(value, values[0], err_msg=tensor)
            return values[0]
        case PerExample(axis):
            return np.concatenate(values, axis)
        case Sum():
            return np.asarray(np.sum(values, 0))
        case Reduced():
            return np.asarray(_REDUCTIONS[kind.by](np.stack(values), 0))
        case Mean(weight):
            weights = [_weight(weight, part, size) for part, size in zip(parts, sizes, strict=True)]
            kept = [w * v for w, v in zip(weights, values, strict=True) if w != 0]
            return np.asarray(sum(kept) / sum(weights))
    raise AssertionError(f"{tensor} cannot be joined: {kind}")


def _weight(weight: Weight, part: Values, size: int) -> float:
    match weight:
        case Examples():
            return float(size)
        case Elements(tensor):
            return float(part[tensor].size)
        case Scalar(tensor):
            return float(part[tensor])
        case Total(tensor, inner):
            return float(part[tensor]) * _weight(inner, part, size)
    raise AssertionError(weight)


def _tensors_of(weight: Weight) -> list[str]:
    match weight:
        case Examples():
            return []
        case Total(tensor, inner):
            return [tensor, *_tensors_of(inner)]
    return [weight.tensor]


def traced(function: Callable[..., object], batch: Sequence[tf.TensorSpec]) -> tuple[Propagation, list[tf.Tensor]]:
    """Returns a traced function with arguments split along their first axis, and its outputs."""
    concrete = tf.function(function).get_concrete_function(*batch)
    graph = concrete.graph
    axes = {tensor.name: 0 for tensor in graph.inputs[: len(batch)]}
    shapes = lambda name: graph.get_tensor_by_name(name).shape  # noqa: E731
    return propagate(_with_handles(concrete), axes, shapes), list(graph.structured_outputs)


def _with_handles(concrete: tf.types.experimental.ConcreteFunction) -> tf.compat.v1.GraphDef:
    """Returns a traced graph in which each captured variable has its own VarHandleOp node."""
    graph_def = concrete.graph.as_graph_def()
    variables = {id(variable.handle): variable for variable in concrete.graph.variables}
    handles = {
        inner.op.name: variables[id(outer)] for outer, inner in concrete.graph.captures if id(outer) in variables
    }
    for node in graph_def.node:
        if node.name in handles:
            variable = handles[node.name]
            node.Clear()
            node.name, node.op = handles_name(variable, handles), "VarHandleOp"
            node.attr["dtype"].type = variable.dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(variable.shape.as_proto())
    return graph_def


def handles_name(variable: tf.Variable, handles: Mapping[str, tf.Variable]) -> str:
    """Returns the name of a variable's node."""
    return next(name for name, own in handles.items() if own is variable)
