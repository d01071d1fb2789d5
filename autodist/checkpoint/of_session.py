"""Checkpoints of a session's variables, by their names, as a `tf.compat.v1.train.Saver` writes and reads them."""

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
from autodist.runtime.variables import Kept


class Session(Protocol):
    """What is known here of a session."""

    @property
    def graph(self) -> tf.Graph: ...

    def saved_variables(self) -> Mapping[str, Kept]:
        """How it has each variable, by name."""

    def give_initial_values(self) -> None:
        """Gives variables that no run has set their initial values; all workers call it."""

    def note_given(self) -> None:
        """Notes that all variables were given values beside any run."""


class SessionCheckpoints(Checkpoints):
    """Saves the variables of a session's graph, and restores them; made by `AutoDist.checkpoint`.

    Args:
        run: in which they are trained.
        folder: of the checkpoints.
        keep: how many stay there.
        session: whose they are.

    Raises:
        CheckpointError: the graph has what a Saver saves in another way than a variable.
    """

    def __init__(self, run: Run, folder: str | os.PathLike[str], keep: int, session: Session) -> None:
        super().__init__(run, folder, keep, {"variables": tf.Module()})  # which the session has, and no object
        self._session = session
        with session.graph.as_default():
            others = [v.name for v in tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.SAVEABLE_OBJECTS)]
            others += [v.name for v in tf.compat.v1.global_variables() if v._get_save_slice_info() is not None]
        if others:
            raise CheckpointError(
                f"{others[0]} is no variable that is saved by itself, but a table, an iterator or a part of one that a "
                "partitioner has cut. Save the session by a tf.compat.v1.train.Saver, or let the strategy cut it."
            )

    # --------------------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        self._session.give_initial_values()

    def _count(self) -> int:
        return 0  # the folder alone tells; where a graph is built a counter could not be read

    def _content(self, number: int, step: int | None, beside: Content) -> Content:
        values = [Value.in_session(name, kept) for name, kept in self._session.saved_variables().items()]
        return Content(values, {"step": step or 0, **beside.about}, beside.files)

    def _require_fits(self, prefix: str) -> None:
        self._keys(prefix)

    def _keys(self, prefix: str) -> dict[str, str]:
        """By name of each variable the key of its value.

        Raises:
            CheckpointMismatchError: it was saved of another graph; names all that differs.
        """
        values, variables = saved_values(tf.train.load_checkpoint(prefix)), self._session.saved_variables()
        keys = dict(_names_of_objects(prefix)) or {key: key for key in values}
        saved = {name: values[key] for name, key in keys.items() if key in values}
        now = {name: described(kept.shape, kept.dtype) for name, kept in variables.items()}
        require_alike(prefix, now, saved, optional={"save_counter"} - now.keys())
        return {name: keys[name] for name in variables}

    def _assign(self, prefix: str) -> None:
        keys, variables = self._keys(prefix), self._session.saved_variables()
        values = [(keys[name], kept) for name, kept in variables.items()]
        self._read_into_session(prefix, values)
        self._session.note_given()


def _names_of_objects(prefix: str) -> Iterator[tuple[str, str]]:
    """Where objects were saved, by name of each variable its key."""
    graph = saved_graph(prefix)
    for node in [] if graph is None else graph.nodes:
        for attribute in node.attributes:
            if attribute.full_name:
                yield attribute.full_name, attribute.checkpoint_key
