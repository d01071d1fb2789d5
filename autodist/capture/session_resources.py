"""Iterators and lookup tables in the graph of a session: shared by its runs, and the elements that a run reads."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import tensorflow as tf
from tensorflow.python.framework import op_def_registry  # names of an op's inputs

from autodist.capture.captured_resources import find_table_write
from autodist.capture.graphs import bodies_of
from autodist.errors import CaptureError
from autodist.graph.editor import GraphDef, GraphEditor, NodeDef
from autodist.graph.names import node_of
from autodist.graph.ops import Trait, having
from autodist.graph.step import CapturedStep
from autodist.logs.terminal import ALIKE_EVERYWHERE

log = logging.getLogger("autodist")

GETS = having(Trait.ITERATOR_GET)
MAKES = "MakeIterator"

_ONE_SHOT = "OneShotIterator"

_FIX = "Feed them: read each batch in Python (ad.distribute_dataset reads this worker's part) and pass it in feed_dict."


def elements_read(fetches: Iterable[tf.Tensor | tf.Operation], fed: Collection[str]) -> list[tf.Tensor]:
    """Returns the iterator elements that a run reads, in the order of the tensors' names.

    Raises:
        CaptureError: an element is of a kind that cannot be divided among replicas.
    """
    found = {t.name: t for t in _tensors_read(fetches, fed) if t.op.type in GETS and t.name not in fed}
    for element in found.values():
        if element.dtype in (tf.variant, tf.resource):
            raise CaptureError(
                f"the iterator of {element.op.name} has sparse or ragged tensors, or datasets, whose batches cannot "
                f"be divided among replicas. {_FIX}"
            )
    return [found[name] for name in sorted(found)]


def fed_to_iterators(elements: Iterable[tf.Tensor], fed: Collection[str]) -> set[str]:
    """Returns the fed tensors that `elements` depend on, such as the handle of a feedable iterator."""
    return {t.name for t in _tensors_read({e.op for e in elements}, fed) if t.name in fed}


def _tensors_read(fetches: Iterable[tf.Tensor | tf.Operation], fed: Collection[str]) -> Iterator[tf.Tensor]:
    """Yields all tensors that a run reads; stops at fed tensors and at elements of iterators."""
    seen: set[str] = set()
    front: list[tf.Tensor | tf.Operation] = list(fetches)
    while front:
        one = front.pop()
        if one.name in seen:
            continue
        seen.add(one.name)
        if isinstance(one, tf.Operation):
            front += [*one.inputs, *one.control_inputs, *(one.outputs[:1] if one.type in GETS else ())]
            continue
        yield one
        if one.name not in fed and one.op.type not in GETS:
            front.append(one.op)


def only_makes_iterators(step: CapturedStep) -> bool:
    """Returns True if a run initializes iterators and trains nothing; its feeds are then all the data, not a batch."""
    return not step.gradients and bool(step.graph_index.of_op(MAKES))


def only_uses_resources(step: CapturedStep) -> bool:
    """Returns True if a run initializes or names iterators, or fills tables, and touches no variable."""
    uses = bool(step.graph_index.having(Trait.ITERATOR)) or find_table_write(step.graph_def) is not None
    return uses and not step.variables


def share_resources(step: CapturedStep, session: str) -> CapturedStep:
    """Makes all runs of a session use the same iterators and tables, which other sessions do not share.

    A one-shot iterator, which each of its nodes would create again, becomes one that is created before the first run.

    Args:
        step: a run of the session.
        session: a name that no other session has.
    """
    kept = [node.name for node in step.graph_index.having(Trait.ITERATOR | Trait.TABLE)]
    if not kept:
        return step
    editor = GraphEditor(step.graph_def, step.graph_index)
    initializers = dict(step.initializers)
    for name in kept:
        node = editor[name]
        shared = f"{session}/{node.attr['shared_name'].s.decode() or node.name}"
        node.attr["shared_name"].s = shared.encode()
        if node.op == _ONE_SHOT:
            initializers[shared] = _make_before(editor, node)
    return replace(step, graph_def=editor.to_graph_def(), initializers=initializers)


def _make_before(editor: GraphEditor, iterator: NodeDef) -> str:
    """Converts a one-shot iterator into one with a separate initializer node; returns that node's name."""
    # TensorFlow would fold a PartitionedCall.
    dataset = NodeDef(name=f"{iterator.name}/dataset", op="StatefulPartitionedCall")
    dataset.attr["f"].CopyFrom(iterator.attr["dataset_factory"])
    dataset.attr["Tin"].list.SetInParent()
    dataset.attr["Tout"].list.type.append(tf.variant.as_datatype_enum)
    made = NodeDef(name=f"{iterator.name}/make", op=MAKES, input=[dataset.name, iterator.name])
    iterator.op = "IteratorV2"
    del iterator.attr["dataset_factory"]
    editor.add(dataset)
    return editor.add(made)


def warn_iterators_start_over(training: Iterable[tf.Tensor], graph_def: GraphDef, steps: int) -> None:
    """Warns that a resumed run reads batches again that it was trained on, unless a dataset skips them."""
    read = sorted({t.op.name for t in _tensors_read(training, ()) if t.op.type in GETS})
    if read and not any(count and count % steps == 0 for count in _passed_over(graph_def)):
        log.warning(
            "the iterators of a session's graph start over (%s), although the %d completed steps have read from "
            "them: those batches are trained on again. Skip them in the dataset with "
            "dataset.skip(ad.steps_done) after its batch(…), or feed the batches.", ", ".join(read), steps,
            extra=ALIKE_EVERYWHERE,
        )  # fmt: skip


def _passed_over(graph_def: GraphDef) -> Iterator[int]:
    """Yields the number of elements that each `skip` of a graph, or of its one-shot iterators, leaves out."""
    for node, constants in _nodes_with_constants(graph_def):
        count = constants.get(node_of(node.input[1])) if node.op == "SkipDataset" else None
        if count is not None:
            yield int(tf.make_ndarray(count.attr["value"].tensor))


def require_alike(graph_def: GraphDef) -> None:
    """Checks that a graph's datasets have the same elements on every worker.

    Raises:
        CaptureError: one shuffles by a seed that each process draws for itself.
    """
    for node, constants in _nodes_with_constants(graph_def):
        if node.op.startswith("Shuffle") and _draws_its_seed(node, constants):
            raise CaptureError(
                f"the dataset {node.name} shuffles by a seed that every worker draws for itself, so that their "
                "batches would not be parts of one batch. Build the dataset within the scope, which sets the "
                "run's seed, or pass the shuffle a seed."
            )


def _nodes_with_constants(graph_def: GraphDef) -> Iterator[tuple[NodeDef, Mapping[str, NodeDef]]]:
    """Yields each node of a graph and of its functions, with the constants next to it by name."""
    for nodes in bodies_of(graph_def):
        constants = {node.name: node for node in nodes if node.op == "Const"}
        for node in nodes:
            yield node, constants


def _draws_its_seed(shuffle: NodeDef, constants: Mapping[str, NodeDef]) -> bool:
    """Returns True if both seeds of a dataset are zeros, which makes it draw its own."""
    arguments = [a.name for a in op_def_registry.get(shuffle.op).input_arg]
    sources = [source for name, source in zip(arguments, shuffle.input, strict=False) if name in ("seed", "seed2")]
    seeds = [constants.get(node_of(source)) for source in sources]
    return bool(seeds) and all(s is not None and not tf.make_ndarray(s.attr["value"].tensor).any() for s in seeds)
