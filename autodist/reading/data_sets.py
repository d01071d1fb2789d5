"""Structure of `tf.data` pipelines, and fast reads of their elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from autodist.reading.ended_iterators import destroy_aside
from autodist.tf_compat import plain_nests
from autodist.tf_compat.plain_nests import NotPlainError


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
