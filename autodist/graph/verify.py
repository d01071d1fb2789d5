"""Consistency check of a step, for developers of kernels: too expensive for every run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from autodist.errors import RewriteError
from autodist.graph.imported import ImportedGraph
from autodist.graph.names import tensor
from autodist.graph.parts import PendingReduction
from autodist.graph.step import ReplicatedStep, Step


def verify(step: Step, before: Step | None = None) -> None:
    """Passes if TensorFlow accepts the step's graph and the recorded properties of its nodes and tensors hold.

    Args:
        step: the step to check.
        before: a consistent step that a kernel has changed to `step`, if there is one. Specs are then compared only for
            the changed nodes and those that read them, and an unchanged graph is not imported.

    Raises:
        RewriteError: a node reads a missing tensor or has wrong attributes for its op; an input, an output, a target or
            a tensor of a pending reduction is missing; a pending reduction has another dtype than recorded, or a tensor
            another dtype or shape.
    """
    if before is not None and step.graph_def is before.graph_def and _references(step) == _references(before):
        return
    graph = ImportedGraph()
    try:
        graph.import_nodes(step.graph_def)
    except ValueError as error:
        raise RewriteError(f"TensorFlow does not accept the step's graph: {error}") from error
    for use, name in _roots(step):
        _find(graph.get_operation_by_name, use, name)
    for use, name in _tensors(step):
        _find(graph.get_tensor_by_name, use, tensor(name))
    for pending in _reductions(step):
        dtype = graph.get_tensor_by_name(tensor(pending.local[-1])).dtype
        if dtype != pending.dtype:
            raise RewriteError(
                f"the reduction {pending.name} is of {pending.dtype.name}, but the replicas' values are of {dtype.name}"
            )
    for name in step.graph_index.nodes if before is None else _affected(step, before):
        for made in graph.get_operation_by_name(name).outputs:
            _require_as_noted(step, made)


def _references(step: Step) -> object:
    return [*_roots(step), *_tensors(step)], [*_reductions(step)]


def _reductions(step: Step) -> Sequence[PendingReduction]:
    return step.reductions if isinstance(step, ReplicatedStep) else ()


def _affected(step: Step, before: Step) -> Iterator[str]:
    """Yields the nodes that differ from those of `before`, and their readers."""
    known = before.graph_index.nodes
    changed = {node.name for node in step.graph_def.node if node != known.get(node.name)}
    for name, sources in step.graph_index.data.items():
        if name in changed or not changed.isdisjoint(sources):
            yield name


def _find(find: Callable[[str], object], use: str, name: str) -> None:
    try:
        find(name)
    except (KeyError, ValueError):
        raise RewriteError(f"{use} {name} is not in the step's graph") from None


def _require_as_noted(step: Step, made: tf.Tensor) -> None:
    """Passes if the recorded spec of a tensor, if any, is compatible with the one that TensorFlow infers."""
    try:
        noted = step.noted(made.name)
    except KeyError:
        return
    if noted.dtype != made.dtype or not noted.shape.is_compatible_with(made.shape):
        raise RewriteError(
            f"{made.name} is recorded as {noted.dtype.name}{noted.shape}, but TensorFlow infers {made.dtype.name}"
            f"{made.shape}"
        )


def _roots(step: Step) -> Iterator[tuple[str, str]]:
    yield from (("the target", name) for name in step.targets)
    yield from (("the background node", name) for name in step.background_nodes)
    yield from (("the standing node", name) for name in step.standing_nodes)
    yield from (("the node of an outer step", name) for one in step.outer_steps.values() for name in one.nodes)
    yield from (("the initializer", name) for name in step.initializers.values())


def _tensors(step: Step) -> Iterator[tuple[str, str]]:
    yield from (("the input", name) for name in step.inputs)
    yield from (("the output", name) for name in step.outputs)
    for pending in _reductions(step):
        owner = f"of the reduction {pending.name}"
        yield from ((f"{owner} the local tensor", name) for name in pending.local)
        yield from ((f"{owner} the result", name) for name in pending.result)
        if pending.weight is not None:
            yield f"{owner} the weight", pending.weight
