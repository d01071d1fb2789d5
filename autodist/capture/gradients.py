"""Notes gradients where they are made: `tf.gradients` and `tf.GradientTape.gradient`, never guessed from op types."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python.framework import ops  # the registry of gradients

from autodist.capture.jacobians import BatchJacobian, Jacobian, keeps_records
from autodist.capture.loss_decomposition import SEED_NAME, DecompositionPoint, take_apart
from autodist.capture.patches import (
    FORWARD_DERIVATIVE,
    GRAPH_GRADIENTS,
    TAPE_BATCH_JACOBIAN,
    TAPE_GRADIENT,
    TAPE_JACOBIAN,
    VECTORIZED,
    patched,
)

_CUSTOM = "CustomGradient-"
"""How the names begin under which `tf.custom_gradient` registers its calls."""


@dataclass(frozen=True)
class NotedCall:
    """One call of `gradient`.

    Attributes:
        graph: in which the gradients were made.
        targets: what was differentiated.
        seed: a scalar, 1 unless it is replaced, to which the gradients are proportional.
        pairs: handle of a variable, and its gradient (a tensor or IndexedSlices), where there is one; none, where what
            was differentiated by are other tensors alone.
        without: handles of variables that the targets do not depend on.
        seams: where the targets can be taken apart; none for one alone that is no arithmetic on several values.
    """

    graph: tf.Graph
    targets: tuple[tf.Tensor, ...]
    seed: tf.Tensor
    pairs: tuple[tuple[Any, tf.Tensor | tf.IndexedSlices], ...]
    without: tuple[Any, ...]
    seams: tuple[DecompositionPoint, ...] = ()


class TakesApart(Protocol):
    """Takes targets apart, and may first change the graph that makes them."""

    def take_apart(
        self, targets: Sequence[tf.Tensor], ends: Collection[tf.Tensor], seed: tf.Tensor, earlier: Sequence[NotedCall]
    ) -> tuple[list[tf.Tensor], tuple[DecompositionPoint, ...]]: ...


@dataclass
class GradientNotes:
    """What was noted, in order.

    Attributes:
        calls: the calls.
        in_functions: whether graphs of functions are looked at, or else plain graphs.
        wants_records: whether a jacobian could be written out if its tape kept what it has recorded.
        whole: gives what `tf.gradients` differentiates the whole batch's sums and means; None: nothing does.
    """

    calls: list[NotedCall] = field(default_factory=list)
    in_functions: bool = True
    wants_records: bool = False
    whole: TakesApart | None = None
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

    def differentiate(
        self,
        targets: Any,
        sources: Any,
        weights: Any,
        plain: Any,
        recording: AbstractContextManager[object] | None = None,
        stops: Any = None,
    ) -> Any:
        """Calls `plain(targets, weights)` with the weights multiplied by a seed, and notes what comes of it.

        Args:
            targets: as given by the user; flat or nested.
            sources: likewise.
            weights: gradients of the outcome by the targets; None: ones.
            plain: the function that differentiates.
            recording: in which what is computed of the targets can be differentiated.
            stops: tensors that are taken for constants.
        """
        with self._inside() as is_outermost:
            handles = [_handle_of(s) for s in tf.nest.flatten(sources)]
            flat = tf.nest.flatten(targets, expand_composites=False)
            if not is_outermost or not self._looks_here() or not flat or not _floats(flat):
                return plain(targets, weights)
            graph = tf.compat.v1.get_default_graph()
            tensors = [tf.convert_to_tensor(t) for t in flat]
            seed = _seed_of(tensors)
            given = [None] * len(flat) if weights is None else tf.nest.flatten(weights)
            ends = [s for s in (*tf.nest.flatten(sources), *tf.nest.flatten(stops)) if isinstance(s, tf.Tensor)]
            with recording or nullcontext():
                tensors, given = _weigh(tensors, given)
                if self.whole is None or recording is not None:  # a tape has recorded what the targets are made of
                    apart, seams = take_apart(tensors, ends)
                else:
                    apart, seams = self.whole.take_apart(tensors, ends, seed, self.calls)
            weighted = [
                (tf.ones_like(t) if w is None else w) * tf.cast(seed, t.dtype)
                for t, w in zip(apart, given, strict=True)
            ]
            found = plain(*(tf.nest.pack_sequence_as(targets, flat) for flat in (apart, weighted)))
            gradients = _each_its_own(tf.nest.flatten(found, expand_composites=False))
            made = list(zip(handles, gradients, strict=True))
            self.calls.append(
                NotedCall(
                    graph,
                    tuple(tensors),
                    seed,
                    tuple((h, g) for h, g in made if h is not None and g is not None),
                    tuple(h for h, g in made if h is not None and g is None),
                    seams,
                )
            )
            return tf.nest.pack_sequence_as(found, gradients)

    def jacobian(self, tape: tf.GradientTape, target: Any, way: Jacobian, plain: Callable[[Any], Any]) -> Any:
        """Computes a jacobian of the target times a seed, to which all that comes of it is proportional.

        Args:
            tape: by which it is differentiated.
            target: as given by the user.
            way: to write it out.
            plain: what TensorFlow does.
        """
        with self._inside() as is_outermost:
            if not is_outermost or not self._looks_here() or not _floats([target]):
                return plain(target)
            whole = tf.convert_to_tensor(target)
            seed = _seed_of([whole])
            with tape._ensure_recording():
                weighted = whole * seed
            self.calls.append(NotedCall(tf.compat.v1.get_default_graph(), (whole,), seed, (), ()))
            if not way.is_written_out(weighted):
                return plain(weighted)
            self.wants_records |= not keeps_records(tape)
            return way.of(tape, weighted) if keeps_records(tape) else plain(weighted)


def _seed_of(targets: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.raw_ops.PlaceholderWithDefault(input=tf.ones([], targets[0].dtype), shape=[], name=SEED_NAME)


def _weigh(
    targets: Sequence[tf.Tensor], weights: Sequence[tf.Tensor | None]
) -> tuple[list[tf.Tensor], list[tf.Tensor | None]]:
    """Targets multiplied by the weights that the script gives them, so that propagation sees what the weights are."""
    found: list[tuple[tf.Tensor, tf.Tensor | None]] = []
    for target, weight in zip(targets, weights, strict=True):
        if weight is None or not isinstance(weight, tf.Tensor) or weight.op.type == "Const":
            found.append((target, weight))
            continue
        product = target * tf.stop_gradient(weight)
        found.append((product if product.shape.rank == 0 else tf.reduce_sum(product), None))
    return [t for t, _ in found], [w for _, w in found]


def _each_its_own(gradients: Sequence[Any]) -> list[Any]:
    """The gradients of several variables, of which no two have a tensor in common.

    Both terms of a sum have the same tensor as their gradient, and an update that reads it would not show whose it is.
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
def noting_gradients(in_functions: bool = True, whole: TakesApart | None = None) -> Iterator[GradientNotes]:
    """Notes all gradients that are made in graphs while the context is open.

    Args:
        in_functions: whether in those of functions, or else in plain graphs.
        whole: gives what `tf.gradients` differentiates the whole batch's sums and means; None: nothing does.
    """
    notes = GradientNotes(in_functions=in_functions, whole=whole)

    def unnoted(differentiating: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with notes._inside():
            return differentiating(*args, **kwargs)

    def jacobian(kind: type[Jacobian], of_tape: Any, self: tf.GradientTape, target: Any, *args: Any, **kw: Any) -> Any:
        """`jacobian` or `batch_jacobian` of a tape, whose third parameter is what is differentiated by."""
        signature = inspect.signature(of_tape)
        bound = signature.bind(self, target, *args, **kw)
        bound.apply_defaults()
        by = [*signature.parameters][2]
        asked = kind(bound.arguments[by], bound.arguments["unconnected_gradients"])
        return notes.jacobian(self, target, asked, lambda t: of_tape(self, t, *args, **kw))

    def gradient(
        tape_gradient: Any,
        self: tf.GradientTape,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        plain = lambda t, w: tape_gradient(self, t, sources, w, unconnected_gradients)  # noqa: E731
        return notes.differentiate(target, sources, output_gradients, plain, self._ensure_recording())

    def helper(graph_gradients: Any, ys: Any, xs: Any, grad_ys: Any = None, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("src_graph") is not None or len(args) >= 7:  # TensorFlow differentiates the body of a loop
            return graph_gradients(ys, xs, grad_ys, *args, **kwargs)
        ys = list(ys) if isinstance(ys, list | tuple) else [ys]
        stops = args[4] if len(args) > 4 else kwargs.get("stop_gradients")
        plain = lambda t, w: graph_gradients(t, xs, w, *args, **kwargs)  # noqa: E731
        return notes.differentiate(ys, xs, grad_ys, plain, stops=stops)

    with patched(
        {
            TAPE_GRADIENT: gradient,
            TAPE_JACOBIAN: functools.partial(jacobian, Jacobian),
            TAPE_BATCH_JACOBIAN: functools.partial(jacobian, BatchJacobian),
            GRAPH_GRADIENTS: helper,
            VECTORIZED: unnoted,  # the gradient of a single example has no part of a batch
            FORWARD_DERIVATIVE: unnoted,  # an op's forward derivative is the gradient of its gradient by its weights
        }
    ):
        yield notes


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
