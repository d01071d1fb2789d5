"""Structure of `tf.data` pipelines, and fast reads of their elements."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops  # the class of data sets with one input

from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.reading.ended_iterators import destroy_aside
from autodist.tf_compat import plain_nests
from autodist.tf_compat.plain_nests import NotPlainError

log = logging.getLogger("autodist")

_IGNORED = tf.data.experimental.ExternalStatePolicy.IGNORE.value


def all_of(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields a data set and, recursively, its inputs."""
    yield dataset
    for one in dataset._inputs():
        yield from all_of(one)


def kind_of(dataset: Any) -> str:
    """Returns TensorFlow's name for the operation of a data set: "Batch" for a `_BatchDataset`."""
    return type(dataset).__name__.removeprefix("_").removesuffix("Dataset")


def begins_within(dataset: Any) -> bool:
    """Returns True if one iteration restarts an input several times, each time with another shuffled order."""
    if not isinstance(dataset, tf.data.Dataset) or dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        return False
    return any(kind_of(one) in ("Repeat", "Concatenate") for one in all_of(dataset))


def has_one_order(dataset: tf.data.Dataset) -> bool:
    """Returns False if a data set's elements may come in another order each time (`deterministic=False`)."""
    return dataset.options().deterministic is not False and not any(map(_takes_what_comes_first, all_of(dataset)))


def _takes_what_comes_first(dataset: Any) -> bool:
    if kind_of(dataset) != "ParallelInterleave":
        return bool(getattr(dataset, "_deterministic", "") == "false")
    try:  # its object does not keep the argument
        graph = tf.raw_ops.DatasetToGraphV2(
            input_dataset=dataset._variant_tensor, external_state_policy=_IGNORED, strip_device_assignment=False
        )
    except tf.errors.OpError:
        return False
    graph_def = tf.compat.v1.GraphDef.FromString(graph.numpy())
    nodes = [*graph_def.node, *(node for one in graph_def.library.function for node in one.node_def)]
    return any("deterministic" in node.attr and node.attr["deterministic"].s == b"false" for node in nodes)


def in_one_order(dataset: Any) -> Any:
    """Returns data whose elements all workers read in the same order, of which each takes its own part."""
    if not isinstance(dataset, tf.data.Dataset) or not tf.executing_eagerly() or has_one_order(dataset):
        return dataset
    _log_one_order()
    return _InOneOrder(dataset)


@functools.cache
def _log_one_order() -> None:
    log.info(
        "deterministic=False of a data set has no effect: all workers read it in the same order, so that each example "
        "is used once.", extra=ALIKE_EVERYWHERE,
    )  # fmt: skip


class _InOneOrder(dataset_ops.UnaryUnchangedStructureDataset):
    """A data set in which `deterministic=False` has no effect."""

    def __init__(self, dataset: Any) -> None:
        variant = tf.raw_ops.OptimizeDatasetV2(
            input_dataset=dataset._variant_tensor,
            optimizations_enabled=["make_deterministic"],
            optimizations_disabled=[],
            optimizations_default=[],
            **dataset._flat_structure,
        )
        super().__init__(dataset, variant)


Read = Callable[[], Any]


def quick_read(iterator: Iterator[Any]) -> Read | None:
    """Returns a function that reads the next element like `next(iterator)`, without a reference to the iterator.

    TensorFlow computes the structure of the element again for each element, which for small batches takes longer than
    reading it. A data set's iterator is destroyed in the background once neither it nor the function is used.

    Returns:
        A function that raises StopIteration at the end of the data, and TensorFlow's errors. None: use `next`, since
        the iterator is not a data set's, or its elements are not tensors.
    """
    if not isinstance(iterator, tf.data.Iterator):
        return None
    resource, spec = tf.nest.flatten(iterator, expand_composites=True), iterator.element_spec
    specs = tf.nest.flatten(spec)
    are_tensors = all(type(one) is tf.TensorSpec for one in specs)
    if not are_tensors or not tf.config.experimental.get_synchronous_execution():
        destroy_aside(iterator, resource)
        return None
    types, shapes = [one.dtype for one in specs], [one.shape for one in specs]
    pack = _packer(spec)

    def read() -> Any:
        try:
            tensors = tf.raw_ops.IteratorGetNext(iterator=resource[0], output_types=types, output_shapes=shapes)
        except tf.errors.OutOfRangeError:
            raise StopIteration from None
        return pack(tensors)

    destroy_aside(read, resource)
    return read


def reading(iterator: Iterator[Any]) -> Read:
    """Returns a function that reads the next element like `next(iterator)`, the fast one if possible."""
    return quick_read(iterator) or iterator.__next__


def elements_of(iterator: Iterator[Any]) -> Iterator[Any]:
    """Yields the elements of an iterator, read as by `reading`."""
    read = reading(iterator)
    while True:
        try:
            element = read()
        except StopIteration:
            return
        yield element


def until_end(iterator: Iterator[Any]) -> Iterator[Any]:
    """Yields the elements of an iterator as `next` returns them; it may also end with TensorFlow's error."""
    while True:
        try:
            yield next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            return


def _packer(spec: Any) -> Callable[[list[tf.Tensor]], Any]:
    """Returns a function that packs tensors into an element."""
    try:
        plain_nests.form_of(spec, _require_tensor)
    except NotPlainError:
        return lambda tensors: tf.nest.pack_sequence_as(spec, tensors)
    return lambda tensors: plain_nests.filled(spec, iter(tensors))


def _require_tensor(leaf: Any) -> None:
    if type(leaf) is not tf.TensorSpec:
        raise NotPlainError(type(leaf).__name__)
