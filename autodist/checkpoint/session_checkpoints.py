"""Checkpoints of a session's variables by name, as a `tf.compat.v1.train.Saver` writes and reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Protocol

import tensorflow as tf

from autodist.checkpoint.checkpoints import Checkpoints
from autodist.checkpoint.content import Content, Value
from autodist.checkpoint.read import described, require_alike, saved_graph, saved_values
from autodist.errors import CheckpointError
from autodist.runs.run import Run
from autodist.runtime.variables import StoredVariable


class Session(Protocol):
    """The part of a session's interface used here."""

    @property
    def graph(self) -> tf.Graph: ...

    def saved_variables(self) -> Mapping[str, StoredVariable]:
        """Returns the session's variables by name."""

    def give_initial_values(self) -> None:
        """Initializes variables that no run has set; every worker calls it."""

    def mark_set(self) -> None:
        """Records that all variables were set outside a run."""


class SessionCheckpoints(Checkpoints):
    """Saves and restores the variables of a session's graph; created by `AutoDist.checkpoint`.

    Args:
        run: the run that trains the variables.
        folder: the folder of the checkpoints.
        keep: the number of checkpoints to keep.
        session: the session that has the variables.

    Raises:
        CheckpointError: the graph has an object that a Saver does not save as a variable.
    """

    def __init__(self, run: Run, folder: str | os.PathLike[str], keep: int, session: Session) -> None:
        super().__init__(run, folder, keep, {"variables": tf.Module()})  # the session has the variables, not an object
        self._session = session
        with session.graph.as_default():
            others = [v.name for v in tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.SAVEABLE_OBJECTS)]
            others += [v.name for v in tf.compat.v1.global_variables() if v._get_save_slice_info() is not None]
        if others:
            raise CheckpointError(
                f"{others[0]} cannot be saved as a variable: it is a table, an iterator or a shard of a TensorFlow "
                "partitioner. Save the session with a tf.compat.v1.train.Saver, or let the strategy partition it."
            )

    # --------------------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        self._session.give_initial_values()

    def _count(self) -> int:
        return 0  # numbers follow from the files in the folder; a counter could not be read while a graph is built

    def _content(self, number: int, step: int | None, extra: Content) -> Content:
        values = [Value.in_session(name, stored) for name, stored in self._session.saved_variables().items()]
        return Content(values, {"step": step or 0, **extra.about}, extra.files)

    def _require_fits(self, prefix: str) -> None:
        self._keys(prefix)

    def _keys(self, prefix: str) -> dict[str, str]:
        """Maps the name of each variable to the key of its value.

        Raises:
            CheckpointMismatchError: the checkpoint was saved from another graph; the message names all differences.
        """
        values, variables = saved_values(tf.train.load_checkpoint(prefix)), self._session.saved_variables()
        keys = dict(_names_of_objects(prefix)) or {key: key for key in values}
        saved = {name: values[key] for name, key in keys.items() if key in values}
        now = {name: described(stored.shape, stored.dtype) for name, stored in variables.items()}
        require_alike(prefix, now, saved, optional={"save_counter"} - now.keys())
        return {name: keys[name] for name in variables}

    def _assign(self, prefix: str) -> None:
        keys, variables = self._keys(prefix), self._session.saved_variables()
        values = [(keys[name], stored) for name, stored in variables.items()]
        self._read_into_session(prefix, values)
        self._session.mark_set()


def _names_of_objects(prefix: str) -> Iterator[tuple[str, str]]:
    """Yields the name and the key of each variable of an object-based checkpoint (`tf.train.Checkpoint`)."""
    graph = saved_graph(prefix)
    for node in [] if graph is None else graph.nodes:
        for attribute in node.attributes:
            if attribute.full_name:
                yield attribute.full_name, attribute.checkpoint_key
