"""Which options of a session's run mean the same for the rewritten step."""

from __future__ import annotations

import tensorflow as tf

from autodist.errors import CaptureError
from autodist.runtime.program import RunMetadata, RunOptions


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
