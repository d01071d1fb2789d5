"""Records gradients where they are computed (`tf.gradients`, `tf.GradientTape.gradient`), not by types of ops."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python.framework import ops  # the registry of gradients

from autodist.capture.graphs import is_in_branch, records_here
from autodist.capture.jacobians import BatchJacobian, Jacobian, keeps_records
from autodist.capture.loss_decomposition import SEED_NAME, DecompositionPoint, decompose
from autodist.capture.tape_records import has_recorded, noting_records
from autodist.tf_compat.patches import (
    FORWARD_DERIVATIVE,
    GRAPH_GRADIENTS,
    TAPE_BATCH_JACOBIAN,
    TAPE_GRADIENT,
    TAPE_JACOBIAN,
    VECTORIZED,
    Patch,
    patched,
)

_CUSTOM = "CustomGradient-"
"""Prefix of the names under which `tf.custom_gradient` registers its calls."""


@dataclass(frozen=True)
class RecordedGradientCall:
    """One call of `gradient`.

    Attributes:
        graph: the graph of the gradients.
        targets: the differentiated tensors.
        seed: a scalar, 1 unless it is replaced, that scales the gradients.
        pairs: handles of variables with their gradients (tensors or IndexedSlices). Empty if the sources are all
            tensors.
        without: handles of variables that the targets do not depend on.
        decomposition_points: the decomposition points of the targets. Empty for a single target that is not computed
            from several values.
    """

    graph: tf.Graph
    targets: tuple[tf.Tensor, ...]
    seed: tf.Tensor
    pairs: tuple[tuple[Any, tf.Tensor | tf.IndexedSlices], ...]
    without: tuple[Any, ...]
    decomposition_points: tuple[DecompositionPoint, ...] = ()

    @property
    def forward_tensors(self) -> list[tf.Tensor]:
        """The seed, the targets, and the script's tensors at the decomposition points."""
        return [self.seed, *self.targets, *(point.tensor for point in self.decomposition_points)]


def tensors_of(gradient: tf.Tensor | tf.IndexedSlices) -> tuple[tf.Tensor, ...]:
    """Returns the tensors of a gradient, its values last."""
    return (gradient.indices, gradient.values) if isinstance(gradient, tf.IndexedSlices) else (gradient,)


class DecomposesLoss(Protocol):
    """Decomposes targets, and may first change the graph that computes them."""

    def decompose(
        self,
        targets: Sequence[tf.Tensor],
        ends: Collection[tf.Tensor],
        seed: tf.Tensor,
        earlier: Sequence[RecordedGradientCall],
    ) -> tuple[list[tf.Tensor], tuple[DecompositionPoint, ...]]: ...


@dataclass
class GradientNotes:
    """The recorded calls, in order.

    Attributes:
        calls: the calls.
        in_functions: True to record in graphs of functions, False in plain graphs.
        wants_records: True if a jacobian could be written out with a tape that keeps its records.
        decomposer: decomposes the targets of `tf.gradients`, with batch statistics over the whole batch; None for
            decomposition with those of each replica.
    """

    calls: list[RecordedGradientCall] = field(default_factory=list)
    in_functions: bool = True
    wants_records: bool = False
    decomposer: DecomposesLoss | None = None
    _depth: threading.local = field(default_factory=threading.local)

    @contextmanager
    def _inside(self) -> Iterator[bool]:
        """Yields True for the outermost call, which includes the calls within it."""
        depth = getattr(self._depth, "value", 0)
        self._depth.value = depth + 1
        try:
            yield depth == 0
        finally:
            self._depth.value = depth

    def differentiate(
        self,
        targets: Any,
        sources: Any,
        weights: Any,
        plain: Any,
        tape: tf.GradientTape | None = None,
        stops: Any = None,
    ) -> Any:
        """Calls `plain(targets, weights)` with the weights multiplied by a seed, and records the gradients.

        Args:
            targets: the targets, flat or nested, as the user passes them.
            sources: the sources, flat or nested, as the user passes them.
            weights: output gradients of the targets; None for ones.
            plain: the wrapped function.
            tape: the tape that differentiates; None for a graph.
            stops: tensors that are treated as constants.
        """
        with self._inside() as is_outermost:
            handles = [_handle_of(s) for s in tf.nest.flatten(sources)]
            flat = tf.nest.flatten(targets, expand_composites=False)
            if not is_outermost or not records_here(self.in_functions) or not flat or not _floats(flat):
                return plain(targets, weights)
            graph = tf.compat.v1.get_default_graph()
            tensors = [tf.convert_to_tensor(t) for t in flat]
            seed = _seed_of(tensors)
            flat_weights = [None] * len(flat) if weights is None else tf.nest.flatten(weights)
            ends = [s for s in (*tf.nest.flatten(sources), *tf.nest.flatten(stops)) if isinstance(s, tf.Tensor)]
            with nullcontext() if tape is None else tape._ensure_recording():
                tensors, flat_weights = _weigh(tensors, flat_weights)
                points: tuple[DecompositionPoint, ...] = ()
                if is_in_branch(graph):  # no kernel sets seeds there, so the gradients keep the layout of the ops
                    apart = tensors
                elif tape is not None:  # it has recorded the targets' inputs
                    apart, points = decompose(tensors, ends, functools.partial(has_recorded, tape))
                elif self.decomposer is None:
                    apart, points = decompose(tensors, ends)
                else:
                    apart, points = self.decomposer.decompose(tensors, ends, seed, self.calls)
            weighted = [
                (tf.ones_like(t) if w is None else w) * tf.cast(seed, t.dtype)
                for t, w in zip(apart, flat_weights, strict=True)
            ]
            found = plain(*(tf.nest.pack_sequence_as(targets, flat) for flat in (apart, weighted)))
            gradients = _each_its_own(tf.nest.flatten(found, expand_composites=False))
            made = list(zip(handles, gradients, strict=True))
            self.calls.append(
                RecordedGradientCall(
                    graph,
                    tuple(tensors),
                    seed,
                    tuple((h, g) for h, g in made if h is not None and g is not None),
                    tuple(h for h, g in made if h is not None and g is None),
                    points,
                )
            )
            return tf.nest.pack_sequence_as(found, gradients)

    def jacobian(self, tape: tf.GradientTape, target: Any, way: Jacobian, plain: Callable[[Any], Any]) -> Any:
        """Computes a jacobian of the target times a seed, which scales all values computed from it.

        Args:
            tape: the tape.
            target: the target, as the user passes it.
            way: the method to write the jacobian out.
            plain: TensorFlow's method.
        """
        with self._inside() as is_outermost:
            if not is_outermost or not records_here(self.in_functions) or not _floats([target]):
                return plain(target)
            whole = tf.convert_to_tensor(target)
            seed = _seed_of([whole])
            with tape._ensure_recording():
                weighted = whole * seed
            self.calls.append(RecordedGradientCall(tf.compat.v1.get_default_graph(), (whole,), seed, (), ()))
            if not way.is_written_out(weighted):
                return plain(weighted)
            self.wants_records |= not keeps_records(tape)
            return way.of(tape, weighted) if keeps_records(tape) else plain(weighted)


def _seed_of(targets: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.raw_ops.PlaceholderWithDefault(input=tf.ones([], targets[0].dtype), shape=[], name=SEED_NAME)


def _weigh(
    targets: Sequence[tf.Tensor], weights: Sequence[tf.Tensor | None]
) -> tuple[list[tf.Tensor], list[tf.Tensor | None]]:
    """Returns targets multiplied by the script's weights, so that the propagation sees the weights."""
    found: list[tuple[tf.Tensor, tf.Tensor | None]] = []
    for target, weight in zip(targets, weights, strict=True):
        if weight is None or not isinstance(weight, tf.Tensor) or weight.op.type == "Const":
            found.append((target, weight))
            continue
        product = target * tf.stop_gradient(weight)
        found.append((product if product.shape.rank == 0 else tf.reduce_sum(product), None))
    return [t for t, _ in found], [w for _, w in found]


def _each_its_own(gradients: Sequence[Any]) -> list[Any]:
    """Returns gradients that share no tensor with one another.

    Both terms of a sum have the same tensor as their gradient; an update that reads it would not show its variable.
    """
    taken: set[int] = set()

    def own(tensor: tf.Tensor) -> tf.Tensor:
        if id(tensor) in taken:
            return tf.identity(tensor)
        taken.add(id(tensor))
        return tensor

    def apart(gradient: Any) -> Any:
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(own(gradient.values), own(gradient.indices), gradient.dense_shape)
        return gradient if gradient is None else own(gradient)

    return [apart(gradient) for gradient in gradients]


def _handle_of(source: Any) -> Any:
    """Returns the handle of a variable or of its stand-in; None for a tensor."""
    if isinstance(source, tf.Tensor):
        return source if source.dtype == tf.resource else None
    return getattr(source, "handle", None)


def _floats(targets: list[Any]) -> bool:
    return all(hasattr(t, "dtype") and tf.as_dtype(t.dtype).is_floating for t in targets)


@contextmanager
def recording_gradients(in_functions: bool = True, decomposer: DecomposesLoss | None = None) -> Iterator[GradientNotes]:
    """Records all gradients that are computed in graphs while the context is open.

    Args:
        in_functions: True to record in graphs of functions, False in plain graphs.
        decomposer: decomposes the targets of `tf.gradients`, with batch statistics over the whole batch; None for
            decomposition with those of each replica.
    """
    notes = GradientNotes(in_functions=in_functions, decomposer=decomposer)

    def unnoted(differentiating: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with notes._inside():
            return differentiating(*args, **kwargs)

    def jacobian(kind: type[Jacobian], of_tape: Any, self: tf.GradientTape, target: Any, *args: Any, **kw: Any) -> Any:
        """Wraps `jacobian` or `batch_jacobian`; their third parameter is the sources."""
        signature = inspect.signature(of_tape)
        bound = signature.bind(self, target, *args, **kw)
        bound.apply_defaults()
        by = [*signature.parameters][2]
        written_out = kind(bound.arguments[by], bound.arguments["unconnected_gradients"])
        return notes.jacobian(self, target, written_out, lambda t: of_tape(self, t, *args, **kw))

    def gradient(
        tape_gradient: Any,
        self: tf.GradientTape,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        plain = lambda t, w: tape_gradient(self, t, sources, w, unconnected_gradients)  # noqa: E731
        return notes.differentiate(target, sources, output_gradients, plain, self)

    def helper(graph_gradients: Any, ys: Any, xs: Any, grad_ys: Any = None, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("src_graph") is not None or len(args) >= 7:  # the body of a loop
            return graph_gradients(ys, xs, grad_ys, *args, **kwargs)
        ys = list(ys) if isinstance(ys, list | tuple) else [ys]
        stops = args[4] if len(args) > 4 else kwargs.get("stop_gradients")
        plain = lambda t, w: graph_gradients(t, xs, w, *args, **kwargs)  # noqa: E731
        return notes.differentiate(ys, xs, grad_ys, plain, stops=stops)

    wrappers: dict[Patch, Callable[..., Any]] = {
        TAPE_GRADIENT: gradient,
        TAPE_JACOBIAN: functools.partial(jacobian, Jacobian),
        TAPE_BATCH_JACOBIAN: functools.partial(jacobian, BatchJacobian),
        GRAPH_GRADIENTS: helper,
        VECTORIZED: unnoted,  # the gradient of a single example has no part of a batch
        FORWARD_DERIVATIVE: unnoted,  # an op's forward derivative is the gradient of its gradient by its weights
    }
    with patched(wrappers), noting_records():
        yield notes


def forget_custom_gradients(definition: tf.compat.v1.GraphDef) -> None:
    """Removes the registrations of `tf.custom_gradient` for a graph that is not differentiated again.

    TensorFlow keeps the gradient function of each such call for ever, and with it the whole graph of the call.
    """
    for node in definition.node:
        if "_gradient_op_type" in node.attr:
            name = node.attr["_gradient_op_type"].s.decode()
            if name.startswith(_CUSTOM):
                ops.gradient_registry._registry.pop(name, None)
