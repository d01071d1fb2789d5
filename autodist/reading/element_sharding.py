"""A `tf.data` pipeline of global batches, of which a worker maps the elements of its own part alone.

All workers draw and order elements alike. Where the maps behind the last change of order give one element for each and
draw nothing by themselves, a worker chooses its elements before them:

    source.shuffle(n).map(decode).batch(64)    becomes    source.shuffle(n), its own of each 64, .map(decode), batches
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.data.util import structure  # by which data sets hand elements to functions
from tensorflow.python.framework import op_def_registry

from autodist.graph.ops import Trait, having
from autodist.graph.propagation import propagate
from autodist.graph.propagation.kinds import PerExample
from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.reading.batch_sharding import Counted, OwnRows, Reading, ShardedBatches
from autodist.reading.data_sets import kind_of
from autodist.reading.elementwise import is_elementwise, name_called
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
"""What goes by the numbers of elements alone: before a map of one to one it gives the same as behind it."""

_SAME_AGAIN = having(Trait.CALL | Trait.BRANCH | Trait.LOOP | Trait.READ | Trait.TABLE_READ | Trait.TELLS)
"""Operations that TensorFlow takes for stateful, and that give the same for an element whatever came before it."""

_CALLERS = {"PyFunc": "tf.numpy_function"}
"""Of operations that call Python code, what makes them, where it is not tf.py_function."""

_LEAVES = (tf.TensorSpec, tf.SparseTensorSpec, tf.RaggedTensorSpec)


@dataclass(frozen=True)
class ReadWhole:
    """A map that each worker computes for all examples.

    Attributes:
        map: what it is called, and where it stands.
        reason: why.
    """

    map: str
    reason: str

    def told(self, workers: int) -> str:
        """What the script is told of it."""
        return (
            f"{self.map}, a map of the data set, is computed for all examples by each of {workers} workers, which "
            f"takes {workers} times one device's processor time in all, since {self.reason}. A worker computes its own "
            "examples alone where data are shuffled first, then mapped by functions that draw nothing, or by stateless "
            "seeds that come with the elements, and batched then."
        )


@dataclass(frozen=True)
class ElementReading:
    """How a worker reads a data set.

    Attributes:
        own: its part of each batch; None: it reads whole batches.
        whole: what is computed for all examples nevertheless; None: there is no such map.
    """

    own: ShardedBatches | None
    whole: ReadWhole | None


@dataclass(frozen=True)
class _Pipeline:
    """A data set from its last change of order on; each part in the order in which elements come through.

    Attributes:
        base: which all workers read alike.
        cuts: of its elements by their numbers.
        maps: of elements.
        batch: what makes batches of them.
        behind: maps of batches, and cuts by their numbers.
    """

    base: Any
    cuts: Sequence[Any]
    maps: Sequence[Any]
    batch: Any
    behind: Sequence[Any]


def own_elements(dataset: Any, own_rows: OwnRows) -> ElementReading:
    """A worker's part of each batch of a data set, where that spares it a map.

    Args:
        dataset: of batches.
        own_rows: which rows of a batch the worker has to read.
    """
    if not isinstance(dataset, tf.data.Dataset) or not tf.executing_eagerly():
        return ElementReading(None, None)
    found = _take_apart(dataset)
    if isinstance(found, ReadWhole | None):
        return ElementReading(None, found)
    whole = _map_before(found.base, f"{kind_of(found.base)}, which may change the order, stands behind it")
    if not found.maps:
        return ElementReading(None, whole)
    return ElementReading(ShardedBatches(_counted(found, own_rows).with_options(dataset.options())), whole)


def reading_own(dataset: Any, reading: Reading) -> ShardedBatches | None:
    """As `own_elements`; what is computed for all examples is told, once."""
    if reading.rows is None:
        return None
    found = own_elements(dataset, reading.rows)
    if found.whole is not None:
        _tell(found.whole.told(reading.workers))
    return found.own


@functools.cache
def _tell(told: str) -> None:
    log.info("%s", told, extra=ALIKE_EVERYWHERE)


def _take_apart(dataset: Any) -> _Pipeline | ReadWhole | None:
    """The pipeline of a data set; else a map that all workers compute for all examples, if there is one."""
    behind, batch = _stretch(dataset)
    for one in _maps(behind):
        reason = _why_not_by_rows(one)
        if reason is not None:
            return ReadWhole(_named(one), reason)
    if kind_of(batch) not in _BATCHES:
        return _map_before(batch, f"{kind_of(batch)} stands behind it")
    if dataset.options().deterministic is False or getattr(batch, "_deterministic", "") == "false":
        return _map_before(batch, "the order is left open (deterministic=False)")
    elements, base = _stretch(batch._input_dataset)
    for number, one in enumerate(elements):
        reason = _why_not_alone(one) if kind_of(one) in _MAPS else None
        if reason is not None:
            elements, base = elements[:number], one
            break
    if not all(isinstance(leaf, _LEAVES) for leaf in tf.nest.flatten(base.element_spec)):
        return _map_before(batch, "its elements are others than tensors")
    cuts = [one for one in elements if kind_of(one) in _CUTS]
    return _Pipeline(base, cuts[::-1], _maps(elements)[::-1], batch, behind[::-1])


def _stretch(data: Any) -> tuple[list[Any], Any]:
    """The maps and cuts with which a data set ends, the last first, and what is before them."""
    found = []
    while kind_of(data) in (*_MAPS, *_PASSES, *_CUTS):
        if kind_of(data) not in _PASSES:
            found.append(data)
        data = data._input_dataset
    return found, data


def _maps(operations: Sequence[Any]) -> list[Any]:
    return [one for one in operations if kind_of(one) in _MAPS]


# -- what is told ----------------------------------------------------------------------------------------------------


def _map_before(data: Any, reason: str) -> ReadWhole | None:
    """The last map before an operation of a data set, or that operation itself."""
    if kind_of(data) in _MAPS:
        return ReadWhole(_named(data), _why_not_alone(data) or reason)
    found = (_map_before(one, reason) for one in data._inputs())
    return next((one for one in found if one is not None), None)


def _named(data: Any) -> str:
    function = inspect.unwrap(data._map_func._func)
    code = getattr(function, "__code__", None)
    name = getattr(function, "__name__", type(function).__name__)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


# -- what a map may do -----------------------------------------------------------------------------------------------


def _why_not_alone(data: Any) -> str | None:
    """Why what a map gives for an element may depend on others; None: it does not."""
    if getattr(data, "_deterministic", "") == "false":
        return "its order is left open (deterministic=False)"
    function = data._map_func.function
    graph_def = function.graph.as_graph_def() if hasattr(function, "graph") else None
    if graph_def is None:
        return "it is a function of TensorFlow 1, whose graph is not at hand"
    nodes = [*graph_def.node, *(node for one in graph_def.library.function for node in one.node_def)]
    functions = {one.signature.name for one in graph_def.library.function}
    for node in nodes:
        known = op_def_registry.get(node.op)
        if node.op in functions or node.op in _SAME_AGAIN or (known is not None and not known.is_stateful):
            continue
        if is_elementwise(node):
            continue
        return _told_of_python(node) or f"its {node.op} may give something else each time ({node.name})"
    return None


def _told_of_python(node: tf.compat.v1.NodeDef) -> str | None:
    """What is said of Python code that the script has not marked; None: it is something else."""
    called = name_called(node)
    if called is None:
        return None
    marked = called if called.isidentifier() else "function"
    return (
        f"its {node.op} calls Python code, {called}, which may give something else each time. If {called} works on one "
        f"element at a time and keeps no state of its own, mark it: ad.elementwise({marked}) in the call of "
        f"{_CALLERS.get(node.op, 'tf.py_function')}"
    )


def _why_not_by_rows(data: Any) -> str | None:
    """Why a map of batches may give other rows for a part of a batch than for the whole; None: it does not."""
    reason = _why_not_alone(data)
    if reason is not None:
        return reason
    specs = tf.nest.flatten(data._input_dataset.element_spec)
    if not all(isinstance(x, tf.TensorSpec) and x.shape.rank and x.shape[0] is None for x in specs):
        return "it takes batches of a fixed length, or of what are no tensors"
    graph = data._map_func.function.graph
    inputs = graph.inputs[: len(specs)]
    kinds = propagate(graph.as_graph_def(), {x.name: 0 for x in inputs}, lambda x: graph.get_tensor_by_name(x).shape)
    found = [kinds.kind(output.name) for output in graph.outputs]
    if all(x == PerExample(0) and x.mixed_at is None for x in found) and _keeps_length(graph, inputs):
        return None
    return "it is given whole batches, and it is not known that it gives of each example a row that is this one's alone"


def _keeps_length(graph: tf.Graph, inputs: Sequence[tf.Tensor]) -> bool:
    """Whether a function gives as many rows as it is given, which its shapes say."""
    rows = 7
    with tf.Graph().as_default():
        given = {x.name: tf.compat.v1.placeholder(x.dtype, [rows, *x.shape[1:]]) for x in inputs}
        names = [x.name for x in graph.outputs]
        outputs = tf.import_graph_def(graph.as_graph_def(), given, names, name="")
    return all(x.shape.rank and x.shape[0] == rows for x in outputs)


# -- the data set ----------------------------------------------------------------------------------------------------


def _counted(pipeline: _Pipeline, own_rows: OwnRows) -> tf.data.Dataset:
    data = pipeline.base
    for cut in pipeline.cuts:
        data = _CUTS[kind_of(cut)](data, cut)
    size = pipeline.batch._batch_size
    batches = data.window(size, drop_remainder=pipeline.batch._drop_remainder).enumerate()
    mine = batches.flat_map(ours(lambda number, batch: _own_of(number, batch, own_rows)))
    for one in pipeline.maps:
        mine = mine.map(_behind_the_count(one), **_parallel(one))
    # Each batch but the last has as many of its own, so that these are those of one batch after the other.
    parts = mine.batch(own_rows(size)[1])
    for one in pipeline.behind:
        is_cut = kind_of(one) in _CUTS
        parts = _CUTS[kind_of(one)](parts, one) if is_cut else parts.map(_behind_the_count(one), **_parallel(one))
    return parts.map(ours(lambda told, rows: Counted(told[0][0], told[1][0], rows))).prefetch(tf.data.AUTOTUNE)


def _own_of(number: tf.Tensor, batch: Any, own_rows: OwnRows) -> tf.data.Dataset:
    """A worker's elements of a batch, each beside how many the batch has and what all workers have alike of it."""
    elements = tf.data.Dataset.zip(batch)
    examples = elements.cardinality()
    start, size = own_rows(examples)
    digest = tf.cond(tf.equal(number, 0), lambda: _digest(elements), lambda: tf.constant(0, tf.int64))
    told = tf.data.Dataset.from_tensors((examples, digest)).repeat()
    return tf.data.Dataset.zip((told, elements.skip(start).take(size)))


def _digest(elements: tf.data.Dataset) -> tf.Tensor:
    """Tells batches apart: by it workers see whether they read the same."""

    @ours
    def add(state: tf.Tensor, *element: Any) -> tf.Tensor:
        for leaf in tf.nest.flatten(element, expand_composites=True):
            state = 31 * state + tf.strings.to_hash_bucket_fast(tf.io.serialize_tensor(leaf), 1 << 31)
        return state

    return elements.reduce(tf.constant(0, tf.int64), add)


def _behind_the_count(data: Any) -> Callable[[Any, Any], Any]:
    """The function of a map, as it was traced, on elements that come with what is told of their batch."""
    takes, gives, function = data._input_dataset.element_spec, data.element_spec, data._map_func.function

    @ours
    def call(told: Any, element: Any) -> Any:
        results = function(*structure.to_tensor_list(takes, element))
        return told, structure.from_compatible_tensor_list(gives, results)

    return call


def _parallel(data: Any) -> dict[str, Any]:
    return {"num_parallel_calls": data._num_parallel_calls} if kind_of(data) == "ParallelMap" else {}
