"""Rewrites a `tf.data` pipeline of global batches so that a worker maps only the elements of its own part.

All workers draw and order the elements in the same way. If the maps after the last change of order are one-to-one and
draw no random numbers, a worker selects its elements before these maps:

    source.shuffle(n).map(decode).batch(64)    →    source.shuffle(n), its own of each 64, .map(decode), batches
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.data.util import structure  # packs the elements that data sets pass to functions
from tensorflow.python.framework import op_def_registry

from autodist.graph.ops import Trait, having
from autodist.graph.python_calls import is_elementwise, marked_call, name_called
from autodist.layout import propagate
from autodist.layout.kinds import PerExample
from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.reading.batch_sharding import OwnRows, PartOfBatch, Reading, ShardedBatches
from autodist.reading.data_sets import has_one_order, kind_of
from autodist.tf_compat.do_not_convert import ours

log = logging.getLogger("autodist")

_MAPS = ("Map", "ParallelMap")
_BATCHES = ("Batch", "ParallelBatch")
_PASSES = ("Prefetch", "Options")
_CUTS: dict[str, Callable[[Any, Any], Any]] = {
    "Repeat": lambda data, was: data.repeat(was._count),
    "Take": lambda data, was: data.take(was._count),
    "Skip": lambda data, was: data.skip(was._count),
}
"""Operations on element numbers alone; the results before and after a one-to-one map are the same."""

_SAME_AGAIN = having(Trait.CALL | Trait.BRANCH | Trait.LOOP | Trait.READ | Trait.TABLE_READ | Trait.PRINTS)
"""Operations that TensorFlow counts as stateful, but whose result for an element does not depend on earlier ones."""

_LEAVES = (tf.TensorSpec, tf.SparseTensorSpec, tf.RaggedTensorSpec)


@dataclass(frozen=True)
class UnshardedMap:
    """A map that each worker computes for all examples.

    Attributes:
        map: name and source position of the map.
        reason: the reason why each worker computes all examples.
    """

    map: str
    reason: str

    def message(self, workers: int) -> str:
        """Returns the log message."""
        return (
            f"{self.map}, a map of the data set, is computed for all examples by each of {workers} workers, which "
            f"takes {workers} times one device's processor time in all, since {self.reason}. A worker computes only "
            "its own examples if the data is first shuffled, then mapped by functions that draw no random numbers (or "
            "use stateless seeds from the elements), and then batched."
        )


@dataclass(frozen=True)
class ElementReading:
    """The way in which a worker reads a data set.

    Attributes:
        own: the worker's part of each batch; None if it reads complete batches.
        whole: a map that is computed for all examples nevertheless; None without one.
    """

    own: ShardedBatches | None
    whole: UnshardedMap | None


@dataclass(frozen=True)
class _Pipeline:
    """A data set after its last change of order; operations are in the order in which elements pass them.

    Attributes:
        base: read by all workers in the same way.
        cuts: selections of elements by number.
        maps: maps of elements.
        batch: makes batches of the elements.
        behind: maps of batches, and selections of batches by number.
    """

    base: Any
    cuts: Sequence[Any]
    maps: Sequence[Any]
    batch: Any
    behind: Sequence[Any]


def own_elements(dataset: Any, own_rows: OwnRows) -> ElementReading:
    """Returns a worker's part of each batch of a data set, if that saves the computation of a map.

    Args:
        dataset: a data set of batches.
        own_rows: the rows of a batch that the worker reads.
    """
    if not isinstance(dataset, tf.data.Dataset) or not tf.executing_eagerly():
        return ElementReading(None, None)
    found = _split_pipeline(dataset)
    if isinstance(found, UnshardedMap | None):
        return ElementReading(None, found)
    whole = _map_before(found.base, f"{kind_of(found.base)}, which may change the order, comes after it")
    if not found.maps:
        return ElementReading(None, whole)
    return ElementReading(ShardedBatches(_counted(found, own_rows).with_options(dataset.options())), whole)


def reading_own(dataset: Any, reading: Reading) -> ShardedBatches | None:
    """Like `own_elements`; logs once a map that is computed for all examples."""
    if reading.rows is None:
        return None
    found = own_elements(dataset, reading.rows)
    if found.whole is not None:
        _log_once(found.whole.message(reading.workers))
    return found.own


@functools.cache
def _log_once(message: str) -> None:
    log.info("%s", message, extra=ALIKE_EVERYWHERE)


def _split_pipeline(dataset: Any) -> _Pipeline | UnshardedMap | None:
    """Splits a data set into a pipeline; otherwise returns a map that all workers compute for all examples, or None."""
    behind, batch = _stretch(dataset)
    for one in _maps(behind):
        reason = _reason_not_by_rows(one)
        if reason is not None:
            return UnshardedMap(_named(one), reason)
    if kind_of(batch) not in _BATCHES:
        return _map_before(batch, f"{kind_of(batch)} comes after it")
    if not has_one_order(dataset):
        return _map_before(batch, "the order is not deterministic (deterministic=False)")
    elements, base = _stretch(batch._input_dataset)
    for number, one in enumerate(elements):
        reason = _reason_not_elementwise(one) if kind_of(one) in _MAPS else None
        if reason is not None:
            elements, base = elements[:number], one
            break
    if not all(isinstance(leaf, _LEAVES) for leaf in tf.nest.flatten(base.element_spec)):
        return _map_before(batch, "its elements are not tensors")
    cuts = [one for one in elements if kind_of(one) in _CUTS]
    return _Pipeline(base, cuts[::-1], _maps(elements)[::-1], batch, behind[::-1])


def _stretch(data: Any) -> tuple[list[Any], Any]:
    """Returns the maps and selections at the end of a data set, the last first, and the data set before them."""
    found = []
    while kind_of(data) in (*_MAPS, *_PASSES, *_CUTS):
        if kind_of(data) not in _PASSES:
            found.append(data)
        data = data._input_dataset
    return found, data


def _maps(operations: Sequence[Any]) -> list[Any]:
    return [one for one in operations if kind_of(one) in _MAPS]


# -- messages ---------------------------------------------------------------------------------------------------------


def _map_before(data: Any, reason: str) -> UnshardedMap | None:
    """Returns the last map before an operation of a data set, or that operation if it is a map."""
    if kind_of(data) in _MAPS:
        return UnshardedMap(_named(data), _reason_not_elementwise(data) or reason)
    found = (_map_before(one, reason) for one in data._inputs())
    return next((one for one in found if one is not None), None)


def _named(data: Any) -> str:
    function = inspect.unwrap(data._map_func._func)
    code = getattr(function, "__code__", None)
    name = getattr(function, "__name__", type(function).__name__)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


# -- checks of maps ---------------------------------------------------------------------------------------------------


def _reason_not_elementwise(data: Any) -> str | None:
    """Returns the reason why a map's result for an element may depend on other elements; None if it does not."""
    if getattr(data, "_deterministic", "") == "false":
        return "its order is not deterministic (deterministic=False)"
    function = data._map_func.function
    graph_def = function.graph.as_graph_def() if hasattr(function, "graph") else None
    if graph_def is None:
        return "it is a TensorFlow 1 function, whose graph is not available"
    nodes = [*graph_def.node, *(node for one in graph_def.library.function for node in one.node_def)]
    functions = {one.signature.name for one in graph_def.library.function}
    for node in nodes:
        known = op_def_registry.get(node.op)
        if node.op in functions or node.op in _SAME_AGAIN or (known is not None and not known.is_stateful):
            continue
        if is_elementwise(node):
            continue
        return _python_call_reason(node) or f"its {node.op} may return something else each time ({node.name})"
    return None


def _python_call_reason(node: tf.compat.v1.NodeDef) -> str | None:
    """Returns the message for a node that calls Python code without a mark; None for other nodes."""
    called = name_called(node)
    if called is None:
        return None
    return (
        f"its {node.op} calls Python code, {called}, which may return something else each time. If {called} works on "
        f"one element at a time and keeps no state of its own, mark it: {marked_call(node)}"
    )


def _reason_not_by_rows(data: Any) -> str | None:
    """Returns the reason why a map of batches may depend on the other rows of a batch; None if it does not."""
    reason = _reason_not_elementwise(data)
    if reason is not None:
        return reason
    specs = tf.nest.flatten(data._input_dataset.element_spec)
    if not all(isinstance(x, tf.TensorSpec) and x.shape.rank and x.shape[0] is None for x in specs):
        return "it takes batches of a fixed length, or inputs that are not tensors"
    graph = data._map_func.function.graph
    inputs = graph.inputs[: len(specs)]
    kinds = propagate(graph.as_graph_def(), {x.name: 0 for x in inputs}, lambda x: graph.get_tensor_by_name(x).shape)
    found = [kinds.kind(output.name) for output in graph.outputs]
    if all(x == PerExample(0) and x.mixed_at is None for x in found) and _keeps_length(graph, inputs):
        return None
    return "it takes complete batches, and a row of its result may depend on more than one example"


def _keeps_length(graph: tf.Graph, inputs: Sequence[tf.Tensor]) -> bool:
    """Returns True if, by its shapes, a function returns as many rows as it takes."""
    rows = 7
    with tf.Graph().as_default():
        placeholders = {x.name: tf.compat.v1.placeholder(x.dtype, [rows, *x.shape[1:]]) for x in inputs}
        names = [x.name for x in graph.outputs]
        outputs = tf.import_graph_def(graph.as_graph_def(), placeholders, names, name="")
    return all(x.shape.rank and x.shape[0] == rows for x in outputs)


# -- the data set ----------------------------------------------------------------------------------------------------


def _counted(pipeline: _Pipeline, own_rows: OwnRows) -> tf.data.Dataset:
    data = pipeline.base
    for cut in pipeline.cuts:
        data = _CUTS[kind_of(cut)](data, cut)
    size = pipeline.batch._batch_size
    batches = data.window(size, drop_remainder=pipeline.batch._drop_remainder).enumerate()
    selected = batches.flat_map(ours(lambda number, batch: _own_of(number, batch, own_rows)))
    for one in pipeline.maps:
        selected = selected.map(_behind_the_count(one), **_parallel(one))
    # All batches but the last have the same number of own elements, so these are the parts of consecutive batches.
    parts = selected.batch(own_rows(size)[1])
    for one in pipeline.behind:
        is_cut = kind_of(one) in _CUTS
        parts = _CUTS[kind_of(one)](parts, one) if is_cut else parts.map(_behind_the_count(one), **_parallel(one))
    return parts.map(ours(lambda info, rows: PartOfBatch(info[0][0], info[1][0], rows))).prefetch(tf.data.AUTOTUNE)


def _own_of(number: tf.Tensor, batch: Any, own_rows: OwnRows) -> tf.data.Dataset:
    """Returns a worker's elements of a batch, each with the batch's size and a digest that all workers share."""
    elements = tf.data.Dataset.zip(batch)
    examples = elements.cardinality()
    start, size = own_rows(examples)
    digest = tf.cond(tf.equal(number, 0), lambda: _digest(elements), lambda: tf.constant(0, tf.int64))
    info = tf.data.Dataset.from_tensors((examples, digest)).repeat()
    return tf.data.Dataset.zip((info, elements.skip(start).take(size)))


def _digest(elements: tf.data.Dataset) -> tf.Tensor:
    """Returns a digest of a batch, by which workers check that they read the same data."""

    @ours
    def add(state: tf.Tensor, *element: Any) -> tf.Tensor:
        for leaf in tf.nest.flatten(element, expand_composites=True):
            state = 31 * state + tf.strings.to_hash_bucket_fast(tf.io.serialize_tensor(leaf), 1 << 31)
        return state

    return elements.reduce(tf.constant(0, tf.int64), add)


def _behind_the_count(data: Any) -> Callable[[Any, Any], Any]:
    """Returns a map's traced function, applied to elements that carry the information about their batch."""
    takes, gives, function = data._input_dataset.element_spec, data.element_spec, data._map_func.function

    @ours
    def call(info: Any, element: Any) -> Any:
        results = function(*structure.to_tensor_list(takes, element))
        return info, structure.from_compatible_tensor_list(gives, results)

    return call


def _parallel(data: Any) -> dict[str, Any]:
    return {"num_parallel_calls": data._num_parallel_calls} if kind_of(data) == "ParallelMap" else {}
