"""Requests of a session's runs: fetches and feeds, with the checks of what is supported."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.indexed_slices import IndexedSlicesValue  # TensorFlow's value of a fetched one

from autodist.errors import CaptureError
from autodist.runtime.runnable import RunMetadata, RunOptions
from autodist.tf_compat import plain_nests
from autodist.tf_compat.plain_nests import NotPlainError

FEED_DENSE = (
    "Feed a tf.compat.v1.sparse_placeholder of two or more axes that is made in the scope, or a dense placeholder, "
    "and make it sparse in the graph (tf.sparse.from_dense)."
)

ABSENT = object()
"""Placeholder among the fetches for the dense shape that a sparse gradient may lack."""


@dataclass(frozen=True)
class Request:
    """Fetches and feeds of a run, without values.

    Attributes:
        elements: the flattened fetches.
        fed: the fed tensors, in the order of the feeds.
        dtypes: dtypes of the feeds.
        names: names of the elements, and names of the fed tensors.
        structure: structure of the fetches; None for a plain nest.
        given: the objects that the script has passed; kept alive, since requests are cached by object ids.
    """

    elements: Sequence[tf.Tensor | tf.Operation]
    fed: Sequence[tf.Tensor]
    dtypes: Sequence[Any]
    names: tuple[tuple[str, ...], tuple[str, ...]]
    structure: Any
    given: Sequence[Any]

    @cached_property
    def _unranked(self) -> Sequence[tf.Tensor]:
        """Fed tensors whose rank is unknown in the graph."""
        return [t for t in self.fed if t.shape.rank is None]

    @cached_property
    def digest(self) -> str:
        """A hash of the names, equal on workers that make the same request."""
        return hashlib.sha256("\n".join(itertools.chain(*self.names)).encode()).hexdigest()

    def key(self, arrays: Mapping[tf.Tensor, np.ndarray]) -> Hashable:
        """Returns a key, equal for requests with the same program: names, and ranks of feeds of unknown rank."""
        return (self.names, *(arrays[t].ndim for t in self._unranked)) if self._unranked else self.names

    def arrays(self, values: Iterable[Any]) -> dict[tf.Tensor, np.ndarray]:
        """Returns the feeds by fed tensor, as arrays."""
        return {t: np.asarray(v, dtype) for t, v, dtype in zip(self.fed, values, self.dtypes, strict=True)}

    def filled(self, fetches: Any, values: Iterable[Any]) -> Any:
        """Returns the fetches with the values of the elements in their places."""
        remaining = iter(values)
        if self.structure is None:
            return plain_nests.filled(fetches, remaining)
        result = tf.nest.map_structure(lambda f: None if f is ABSENT else next(remaining), self.structure)
        return plain_nests.named_as(fetches, result)


class Requests:
    """Resolves the requests of a session's runs; caches them for runs of the same form."""

    def __init__(self, graph: tf.Graph) -> None:
        self._graph = graph
        self._known: dict[Hashable, Request] = {}

    def of(self, fetches: Any, feeds: Collection[Any]) -> Request:
        """Returns the request of one run.

        Args:
            fetches: fetches as for `tf.compat.v1.Session.run`.
            feeds: the keys of the feeds.

        Raises:
            CaptureError: a fetch or feed is sparse.
            KeyError, TypeError, ValueError: TensorFlow's: it is not in the graph.
        """
        try:
            form = plain_nests.form_of(fetches, _form_of_element), *map(_form_of_element, feeds)
        except NotPlainError:
            return self._resolve(expanded(fetches), feeds)
        if form not in self._known:
            self._known[form] = replace(self._resolve(fetches, feeds), structure=None)
        return self._known[form]

    def _resolve(self, structure: Any, feeds: Collection[Any]) -> Request:
        fetched, fed = tf.nest.flatten(structure), list(map(self.tensor, feeds))
        elements = [self.element(f) for f in fetched if f is not ABSENT]
        names = tuple(e.name for e in elements), tuple(dict.fromkeys(t.name for t in fed))
        return Request(elements, fed, [t.dtype.as_numpy_dtype for t in fed], names, structure, [*fetched, *feeds])

    def element(self, fetch: Any) -> tf.Tensor | tf.Operation:
        """Returns the graph element for a fetch: a tensor, an operation, a variable or a name."""
        require_dense(fetch, "fetched", "Fetch tf.sparse.to_dense of it, or its tensors one by one.")
        return self._graph.as_graph_element(fetch, allow_tensor=True, allow_operation=True)

    def tensor(self, key: Any) -> tf.Tensor:
        """Returns the tensor for a feed: a tensor, a variable or a name."""
        require_dense(key, "fed", FEED_DENSE)
        if isinstance(key, str) and ":" not in key:
            key = f"{key}:0"
        return self._graph.as_graph_element(key, allow_tensor=True, allow_operation=False)


def _form_of_element(element: Any) -> Hashable:
    if isinstance(element, str):
        return element
    if isinstance(element, tf.Tensor | tf.Operation | tf.Variable):
        return id(element)  # the cached request keeps the object alive, so that its id is not reused
    raise NotPlainError(type(element).__name__)


def require_dense(value: Any, done: str, mend: str) -> None:
    """Checks that a value is not sparse: arrays of a sparse value have no row for each example, and cannot be split.

    Raises:
        CaptureError: the value is sparse.
    """
    if isinstance(value, tf.SparseTensor | tf.IndexedSlices):
        raise CaptureError(
            f"{value.values.name} belongs to a {type(value).__name__}, which cannot be {done}: its arrays have a row "
            f"for each entry, not for each example, so they cannot be split into parts of the replicas. {mend}"
        )


def expanded(fetches: Any) -> Any:
    """Returns the fetches, with sparse gradients expanded to TensorFlow's `IndexedSlicesValue` of tensors.

    Returns:
        The structure of `fetches`, with numbers for unorderable keys (hooks of `MonitoredSession` are keys next to a
        string); ABSENT if a sparse gradient has no dense shape.
    """

    def tensors_of(fetch: Any) -> Any:
        if not isinstance(fetch, tf.IndexedSlices):
            return fetch
        whole = ABSENT if fetch.dense_shape is None else fetch.dense_shape
        return IndexedSlicesValue(fetch.values, fetch.indices, whole)

    return tf.nest.map_structure(tensors_of, plain_nests.numbered(fetches))


def refuse_partial_runs(*_: Any, **__: Any) -> NoReturn:
    """Replaces `partial_run` and its setup.

    Raises:
        CaptureError: always.
    """
    raise CaptureError(
        "partial_run continues a run in pieces, and a step is one run of all workers: they would wait for a piece "
        "that may never come. Fetch all tensors in one session.run, and feed all values there."
    )


def check_options(options: RunOptions | None, metadata: RunMetadata | None) -> None:
    """Checks that options have the same meaning for the rewritten step as for the script's graph.

    Raises:
        CaptureError: an option has another meaning.
        TypeError: an argument has the wrong type.
    """
    if metadata is not None and not isinstance(metadata, tf.compat.v1.RunMetadata):
        raise TypeError(f"run_metadata is {metadata!r}; it must be a tf.compat.v1.RunMetadata.")
    if options is None:
        return
    if not isinstance(options, tf.compat.v1.RunOptions):
        raise TypeError(f"options is {options!r}; it must be a tf.compat.v1.RunOptions.")
    if options.HasField("debug_options"):
        raise CaptureError(
            "debug_options name nodes of the script's graph, and the rewritten step, which runs, has other node names. "
            "Fetch the tensors of interest, or debug the script in a tf.compat.v1.Session."
        )
    if options.experimental.collective_graph_key:
        raise CaptureError(
            "experimental.collective_graph_key distinguishes collectives of different runs, and AutoDist sets it. "
            "Leave it out of the options."
        )
