"""What may be asked of a session's run."""

from __future__ import annotations

from typing import Any, NoReturn

import tensorflow as tf
from tensorflow.python.framework.indexed_slices import IndexedSlicesValue  # what TensorFlow gives for one

from autodist.errors import CaptureError
from autodist.runtime.program import RunMetadata, RunOptions

FEED_DENSE = (
    "Feed a dense placeholder and make it sparse in the graph (tf.sparse.from_dense), or feed strings, one row an "
    "example (tf.io.serialize_many_sparse), and read them with tf.io.deserialize_many_sparse."
)

ABSENT = object()
"""Stands among what is fetched for what a sparse gradient may leave out."""


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
        The structure of `fetches`; ABSENT where a sparse gradient does not say of what shape it is a part.
    """

    def tensors_of(fetch: Any) -> Any:
        if not isinstance(fetch, tf.IndexedSlices):
            return fetch
        whole = ABSENT if fetch.dense_shape is None else fetch.dense_shape
        return IndexedSlicesValue(fetch.values, fetch.indices, whole)

    return tf.nest.map_structure(tensors_of, fetches)


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
