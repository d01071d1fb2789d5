"""Notes gradients where they are made: `tf.gradients` and `tf.GradientTape.gradient`, never guessed from op types."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops  # the registry of gradients
from tensorflow.python.ops import gradients_util  # the one function that all graph-mode entry points call

from autodist.graph.loss_terms import ADDING

SEED_NAME = "autodist_loss_weight"


_CUSTOM = "CustomGradient-"
"""How the names begin under which `tf.custom_gradient` registers its calls."""


@dataclass(frozen=True)
class NotedCall:
    """One call of `gradient` for variables.

    Attributes:
        graph: in which the gradients were made.
        targets: what was differentiated.
        seed: a scalar, 1 unless it is replaced, to which the gradients are proportional.
        pairs: handle of a variable, and its gradient (a tensor or IndexedSlices), where there is one.
        without: handles of variables that the targets do not depend on.
        terms: of a loss that was differentiated term by term, each with a seed of its own.
    """

    graph: tf.Graph
    targets: tuple[tf.Tensor, ...]
    seed: tf.Tensor
    pairs: tuple[tuple[Any, tf.Tensor | tf.IndexedSlices], ...]
    without: tuple[Any, ...]
    terms: tuple[tuple[tf.Tensor, tf.Tensor], ...] = ()


@dataclass
class GradientNotes:
    """What was noted, in order.

    Attributes:
        calls: the calls.
        in_functions: whether graphs of functions are looked at, or else plain graphs.
        by_term: whether a loss that is a sum is differentiated term by term, so that each can have a weight of its own.
    """

    calls: list[NotedCall] = field(default_factory=list)
    in_functions: bool = True
    by_term: bool = False
    _depth: threading.local = field(default_factory=threading.local)

    @contextmanager
    def _inside(self) -> Iterator[bool]:
        """Whether this is the outermost call: what a call differentiates on its way is part of it."""
        depth = getattr(self._depth, "value", 0)
        self._depth.value = depth + 1
        try:
            yield depth == 0
        finally:
            self._depth.value = depth

    def _looks_here(self) -> bool:
        if tf.executing_eagerly():
            return False
        return isinstance(tf.compat.v1.get_default_graph(), tf.__internal__.FuncGraph) == self.in_functions

    def differentiate(self, targets: Any, sources: Any, weights: Any, plain: Any, may_split: bool = True) -> Any:
        """Calls `plain(targets, weights)` with the weights multiplied by a seed, and notes what comes of it.

        Args:
            targets: as given by the user; flat or nested.
            sources: likewise.
            weights: gradients of the outcome by the targets; None: ones.
            plain: the function that differentiates.
            may_split: whether what the targets are the sum of may be differentiated in their place.
        """
        with self._inside() as is_outermost:
            handles = [_handle_of(s) for s in tf.nest.flatten(sources)]
            flat = tf.nest.flatten(targets, expand_composites=False)
            if not is_outermost or not self._looks_here() or all(h is None for h in handles) or not _floats(flat):
                return plain(targets, weights)
            graph = tf.compat.v1.get_default_graph()
            tensors = [tf.convert_to_tensor(t) for t in flat]
            seed = tf.raw_ops.PlaceholderWithDefault(input=tf.ones([], tensors[0].dtype), shape=[], name=SEED_NAME)
            terms = self._terms(tensors, weights, handles, seed) if may_split else []
            if terms:
                found = plain([t for t, _ in terms], [tf.ones_like(t) * tf.cast(w, t.dtype) for t, w in terms])
            else:
                given = [None] * len(flat) if weights is None else tf.nest.flatten(weights)
                weighted = [
                    (tf.ones_like(t) if w is None else w) * tf.cast(seed, t.dtype)
                    for t, w in zip(tensors, given, strict=True)
                ]
                found = plain(targets, tf.nest.pack_sequence_as(targets, weighted))
            gradients = _each_its_own(tf.nest.flatten(found, expand_composites=False))
            made = list(zip(handles, gradients, strict=True))
            self.calls.append(
                NotedCall(
                    graph,
                    tuple(tensors),
                    seed,
                    tuple((h, g) for h, g in made if h is not None and g is not None),
                    tuple(h for h, g in made if h is not None and g is None),
                    tuple(terms),
                )
            )
            return tf.nest.pack_sequence_as(found, gradients)

    def _terms(
        self, targets: Sequence[tf.Tensor], weights: Any, handles: Sequence[Any], seed: tf.Tensor
    ) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """The terms of one loss, each with its seed; none where it is to be differentiated as it is."""
        if not self.by_term or len(targets) != 1 or weights is not None or any(h is None for h in handles):
            return []
        terms = _added_up(targets[0])
        if len(terms) < 2 or len({id(term) for term in terms}) < len(terms):
            return []
        return [(t, tf.raw_ops.PlaceholderWithDefault(input=seed, shape=[], name=SEED_NAME)) for t in terms]


def _added_up(target: tf.Tensor) -> list[tf.Tensor]:
    """The scalars that are added up to a scalar."""
    found = []
    front = [target]
    while front:
        term = front.pop()
        stacked = term.op.inputs[0].op if term.op.type == "Sum" else None
        if term.op.type in ADDING and _are_scalars(term, *term.op.inputs):
            front.extend(term.op.inputs)
        elif stacked is not None and stacked.type == "Pack" and _are_scalars(term, *stacked.inputs):
            front.extend(stacked.inputs)
        else:
            found.append(term)
    return found


def _are_scalars(*tensors: tf.Tensor) -> bool:
    return all(t.shape.rank == 0 for t in tensors)


def _each_its_own(gradients: Sequence[Any]) -> list[Any]:
    """The gradients of several variables, of which no two have a tensor in common.

    Both terms of a sum have the same tensor for a gradient, and an update that reads it does not tell of which.
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
    """The handle of a variable, or of what stands for one; None for a tensor."""
    if isinstance(source, tf.Tensor):
        return source if source.dtype == tf.resource else None
    return getattr(source, "handle", None)


def _floats(targets: list[Any]) -> bool:
    return all(hasattr(t, "dtype") and tf.as_dtype(t.dtype).is_floating for t in targets)


@contextmanager
def noting_gradients(in_functions: bool = True, by_term: bool = False) -> Iterator[GradientNotes]:
    """Notes all gradients of variables that are made in graphs while the context is open.

    Args:
        in_functions: whether in those of functions, or else in plain graphs.
        by_term: whether losses that are sums are differentiated term by term.
    """
    notes = GradientNotes(in_functions=in_functions, by_term=by_term)
    tape_gradient = tf.GradientTape.gradient
    graph_gradients = gradients_util._GradientsHelper

    def gradient(
        self: tf.GradientTape,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        return notes.differentiate(
            target, sources, output_gradients, lambda t, w: tape_gradient(self, t, sources, w, unconnected_gradients)
        )

    def helper(ys: Any, xs: Any, grad_ys: Any = None, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("src_graph") is not None or len(args) >= 7:  # TensorFlow differentiates the body of a loop
            return graph_gradients(ys, xs, grad_ys, *args, **kwargs)
        ys = list(ys) if isinstance(ys, list | tuple) else [ys]
        stops = args[4] if len(args) > 4 else kwargs.get("stop_gradients")
        plain = lambda t, w: graph_gradients(t, xs, w, *args, **kwargs)  # noqa: E731
        return notes.differentiate(ys, xs, grad_ys, plain, may_split=stops is None)

    tf.GradientTape.gradient = gradient
    gradients_util._GradientsHelper = helper
    try:
        yield notes
    finally:
        tf.GradientTape.gradient = tape_gradient
        gradients_util._GradientsHelper = graph_gradients


def forget_custom_gradients(definition: tf.compat.v1.GraphDef) -> None:
    """Lets go of what `tf.custom_gradient` has registered for the nodes of a graph that is not differentiated again.

    TensorFlow keeps the gradient function of every such call for ever, under a name of its own, and with it the tensors
    of the graph in which it was called: the whole graph.
    """
    for node in definition.node:
        if "_gradient_op_type" in node.attr:
            name = node.attr["_gradient_op_type"].s.decode()
            if name.startswith(_CUSTOM):
                ops.gradient_registry._registry.pop(name, None)
