"""Whether a step hangs together, for whoever changes kernels: too dear for every run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from autodist.errors import RewriteError
from autodist.graph.imported import ImportedGraph
from autodist.graph.names import tensor
from autodist.graph.parts import PendingReduction
from autodist.graph.step import Step


def verify(item: Step) -> None:
    """Passes if TensorFlow takes the step's graph, and what is said of its nodes and tensors is so.

    Raises:
        RewriteError: a node reads what is not there, or has other attributes than its op; an input, an output, a node
            that is to run or a part of a join is missing; a join has another dtype than is said, a tensor
            another dtype or shape than is noted.
    """
    graph = ImportedGraph()
    try:
        graph.import_nodes(item.graph_def)
    except ValueError as error:
        raise RewriteError(f"TensorFlow does not take the step's graph: {error}") from error
    for use, name in _roots(item):
        _find(graph.get_operation_by_name, use, name)
    for use, name in _tensors(item):
        _find(graph.get_tensor_by_name, use, tensor(name))
    for join in _joins(item):
        dtype = graph.get_tensor_by_name(tensor(join.local[-1])).dtype
        if dtype != join.dtype:
            raise RewriteError(f"the join {join.name} is of {join.dtype.name}, and the replicas' part of {dtype.name}")
    if item.replication is None:  # later each replica has a part of what was captured
        for node in item.graph_def.node:
            for made in graph.get_operation_by_name(node.name).outputs:
                _require_as_noted(item, made)


def _find(find: Callable[[str], object], use: str, name: str) -> None:
    try:
        find(name)
    except (KeyError, ValueError):
        raise RewriteError(f"{use} {name} is not in the step's graph") from None


def _joins(item: Step) -> Sequence[PendingReduction]:
    return item.replication.joins if item.replication else ()


def _require_as_noted(item: Step, made: tf.Tensor) -> None:
    """Passes if nothing is noted of a tensor, or what TensorFlow infers of it does not contradict that."""
    try:
        noted = item.noted(made.name)
    except KeyError:
        return
    if noted.dtype != made.dtype or not noted.shape.is_compatible_with(made.shape):
        raise RewriteError(
            f"{made.name} is noted as {noted.dtype.name}{noted.shape}, and TensorFlow makes {made.dtype.name}"
            f"{made.shape} of it"
        )


def _roots(item: Step) -> Iterator[tuple[str, str]]:
    yield from (("the target", name) for name in item.targets)
    yield from (("the served node", name) for name in item.served)
    yield from (("the landed node", name) for name in item.flush_targets)
    yield from (("the initializer", name) for name in item.initializers.values())


def _tensors(item: Step) -> Iterator[tuple[str, str]]:
    yield from (("the input", name) for name in item.inputs)
    yield from (("the output", name) for name in item.outputs)
    for join in _joins(item):
        told = f"of the join {join.name}"
        yield from ((f"{told} the part", name) for name in join.local)
        yield from ((f"{told} the result", name) for name in join.result)
        if join.weight is not None:
            yield f"{told} the weight", join.weight
