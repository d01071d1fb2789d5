"""What is, and may be, asked of a session's run."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.indexed_slices import IndexedSlicesValue  # what TensorFlow gives for one

from autodist.errors import CaptureError
from autodist.runtime.program import RunMetadata, RunOptions
from autodist.tf_compat import plain_nests
from autodist.tf_compat.plain_nests import NotPlainError

FEED_DENSE = (
    "Feed a dense placeholder and make it sparse in the graph (tf.sparse.from_dense), or feed strings, one row an "
    "example (tf.io.serialize_many_sparse), and read them with tf.io.deserialize_many_sparse."
)

ABSENT = object()
"""Stands among what is fetched for what a sparse gradient may leave out."""


@dataclass(frozen=True)
class Request:
    """What is fetched and fed, whatever the values are.

    Attributes:
        elements: what is fetched, one after the other.
        fed: what takes values, in the order of the feeds.
        dtypes: of these values.
        names: of the elements, and of what is fed.
        structure: of what is fetched; None: that of a plain nest.
        given: by which it was asked for, and is known as long as it lives.
    """

    elements: Sequence[tf.Tensor | tf.Operation]
    fed: Sequence[tf.Tensor]
    dtypes: Sequence[Any]
    names: tuple[tuple[str, ...], tuple[str, ...]]
    structure: Any
    given: Sequence[Any]

    @cached_property
    def _unranked(self) -> Sequence[tf.Tensor]:
        """What is fed of which the graph does not say how many axes it has."""
        return [t for t in self.fed if t.shape.rank is None]

    @cached_property
    def digest(self) -> str:
        """A hash of the names, equal on workers that make the same request."""
        return hashlib.sha256("\n".join(itertools.chain(*self.names)).encode()).hexdigest()

    def key(self, arrays: Mapping[tf.Tensor, np.ndarray]) -> Hashable:
        """Equal for requests that one program serves: names, and ranks of feeds of which the graph leaves them open."""
        return (self.names, *(arrays[t].ndim for t in self._unranked)) if self._unranked else self.names

    def arrays(self, values: Iterable[Any]) -> dict[tf.Tensor, np.ndarray]:
        """What is fed, by what takes it."""
        return {t: np.asarray(v, dtype) for t, v, dtype in zip(self.fed, values, self.dtypes, strict=True)}

    def filled(self, fetches: Any, values: Iterable[Any]) -> Any:
        """What is fetched, with the values of the elements in their places."""
        remaining = iter(values)
        if self.structure is None:
            return plain_nests.filled(fetches, remaining)
        made = tf.nest.map_structure(lambda f: None if f is ABSENT else next(remaining), self.structure)
        return plain_nests.named_as(fetches, made)


class Requests:
    """Finds what runs of a session ask for, and remembers it for runs that ask for the same.

    Args:
        graph: of the session.
    """

    def __init__(self, graph: tf.Graph) -> None:
        self._graph = graph
        self._known: dict[Hashable, Request] = {}

    def of(self, fetches: Any, feeds: Collection[Any]) -> Request:
        """What one run asks for.

        Args:
            fetches: as `tf.compat.v1.Session.run` takes them.
            feeds: the keys of what is fed.

        Raises:
            CaptureError: something of it is sparse.
            KeyError, TypeError, ValueError: TensorFlow's: it is not of the graph.
        """
        try:
            form = plain_nests.form_of(fetches, _form_of_element), *map(_form_of_element, feeds)
        except NotPlainError:
            return self._found(expanded(fetches), feeds)
        if form not in self._known:
            self._known[form] = replace(self._found(fetches, feeds), structure=None)
        return self._known[form]

    def _found(self, structure: Any, feeds: Collection[Any]) -> Request:
        fetched, fed = tf.nest.flatten(structure), list(map(self.tensor, feeds))
        elements = [self.element(f) for f in fetched if f is not ABSENT]
        names = tuple(e.name for e in elements), tuple(dict.fromkeys(t.name for t in fed))
        return Request(elements, fed, [t.dtype.as_numpy_dtype for t in fed], names, structure, [*fetched, *feeds])

    def element(self, fetch: Any) -> tf.Tensor | tf.Operation:
        """What is fetched by a tensor, an operation, a variable or a name."""
        require_dense(fetch, "fetched", "Fetch tf.sparse.to_dense of it, or its tensors one by one.")
        return self._graph.as_graph_element(fetch, allow_tensor=True, allow_operation=True)

    def tensor(self, key: Any) -> tf.Tensor:
        """What is fed by a tensor, a variable or a name."""
        require_dense(key, "fed", FEED_DENSE)
        if isinstance(key, str) and ":" not in key:
            key = f"{key}:0"
        return self._graph.as_graph_element(key, allow_tensor=True, allow_operation=False)


def _form_of_element(element: Any) -> Hashable:
    if isinstance(element, str):
        return element
    if isinstance(element, tf.Tensor | tf.Operation | tf.Variable):
        return id(element)  # what a known request keeps, so that no other gets it
    raise NotPlainError(type(element).__name__)


def require_dense(value: Any, done: str, mend: str) -> None:
    """Passes unless a value is sparse: its arrays do not have a row for each example, by which they could be split.

    Raises:
        CaptureError: it is.
    """
    if isinstance(value, tf.SparseTensor | tf.IndexedSlices):
        raise CaptureError(
            f"{value.values.name} belongs to a {type(value).__name__}, which cannot be {done}: its arrays have a row "
            f"for each entry and not for each example, so replicas' parts of them say nothing of their examples. {mend}"
        )


def expanded(fetches: Any) -> Any:
    """What is fetched, sparse gradients by their tensors; what they come back as is TensorFlow's `IndexedSlicesValue`.

    Returns:
        The structure of `fetches`, with numbers for keys that have no order, as hooks of `MonitoredSession` are keys
        beside a string; ABSENT where a sparse gradient does not say of what shape it is a part.
    """

    def tensors_of(fetch: Any) -> Any:
        if not isinstance(fetch, tf.IndexedSlices):
            return fetch
        whole = ABSENT if fetch.dense_shape is None else fetch.dense_shape
        return IndexedSlicesValue(fetch.values, fetch.indices, whole)

    return tf.nest.map_structure(tensors_of, plain_nests.numbered(fetches))


def refuse_partial_runs(*_: Any, **__: Any) -> NoReturn:
    """Stands for `partial_run` and its setup.

    Raises:
        CaptureError: always.
    """
    raise CaptureError(
        "partial_run goes on with a run that others have a part in, piece by piece, and a step is one run of all "
        "workers: they would wait for a piece that may never come. Fetch all of it in one session.run, and feed all of "
        "it by then."
    )


def check_options(options: RunOptions | None, metadata: RunMetadata | None) -> None:
    """Passes if options mean the same for the rewritten step as for the script's graph.

    Raises:
        CaptureError: they do not.
        TypeError: these are no options, or nothing that metadata can be written to.
    """
    if metadata is not None and not isinstance(metadata, tf.compat.v1.RunMetadata):
        raise TypeError(f"run_metadata is {metadata!r}; it must be a tf.compat.v1.RunMetadata.")
    if options is None:
        return
    if not isinstance(options, tf.compat.v1.RunOptions):
        raise TypeError(f"options is {options!r}; it must be a tf.compat.v1.RunOptions.")
    if options.HasField("debug_options"):
        raise CaptureError(
            "debug_options name nodes of the script's graph, and what runs is the rewritten step, whose nodes have "
            "other names. Fetch the tensors that are to be seen, or debug the script in a tf.compat.v1.Session."
        )
    if options.experimental.collective_graph_key:
        raise CaptureError(
            "experimental.collective_graph_key tells collectives of different runs apart, and AutoDist sets it itself. "
            "Leave it out of the options."
        )
