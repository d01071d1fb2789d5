"""Calls of a step while a graph of a function is traced."""

from __future__ import annotations

from typing import Any

from tensorflow.python.framework import auto_control_deps_utils as control  # reads and writes of an op or call

from autodist.capture.training_hooks import is_distributing
from autodist.errors import CaptureError


def call_in_function(function: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Calls the plain `tf.function` of a step within another function.

    Within a captured step it is traced inline. Within a `tf.function` of the script, which this process runs alone, it
    computes its whole batch.

    Raises:
        CaptureError: the step trains, and would do so on this process alone.
    """
    if not is_distributing():
        trained = _trained_by(function.get_concrete_function(*args, **kwargs).graph)
        if trained:
            raise CaptureError(
                f"{name} trains {trained[0]} and is called within a tf.function, which this process runs alone, so "
                f"that it would train alone. Replace that tf.function by @ad.function ({name} is then part of "
                f"its step), or call {name} from Python, once for each batch."
            )
    return function(*args, **kwargs)


def _trained_by(graph: Any) -> list[str]:
    """Returns the names of the trainable variables that a function's graph writes."""
    named = {id(v.handle): v.name for v in graph.variables if v.trainable}
    inner = {id(inside): named[id(outside)] for outside, inside in graph.captures if id(outside) in named}
    written = [t for op in graph.get_operations() for t in control.get_read_write_resource_inputs(op)[1]]
    return [inner[id(t)] for t in written if id(t) in inner]
