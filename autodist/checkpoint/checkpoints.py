"""Checkpoints: the object returned by `ad.checkpoint`, which saves and restores models, optimizers and variables."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from autodist.checkpoint.content import Content, Value
from autodist.checkpoint.extra_state import ExtraState, draws_now, resume_draws
from autodist.checkpoint.folder import Folder, digest
from autodist.checkpoint.objects import GRAPH_KEY, SavedObjects, build_optimizers
from autodist.checkpoint.read import read_whole, require_same, require_seen, saved_graph
from autodist.checkpoint.save import Saves
from autodist.checkpoint.slices import KeyedVariable, read_into_process, restore_session
from autodist.errors import CheckpointError
from autodist.runs.coordination import RESTORE
from autodist.runs.run import Run
from autodist.runtime.variables import StoredVariable, TrackedVariable


class Checkpoints:
    """Saves objects of a script into a folder, and restores them; created by `AutoDist.checkpoint`.

    Args:
        run: the run that trains the objects.
        folder: the folder of the checkpoints.
        keep: the number of checkpoints to keep; older ones are removed.
        objects: the objects by name, as for `tf.train.Checkpoint`.
    """

    def __init__(self, run: Run, folder: str | os.PathLike[str], keep: int, objects: Mapping[str, Any]) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep!r}; it must be the number of checkpoints to keep, at least 1.")
        if not objects:
            raise ValueError("name the objects to save, as for tf.train.Checkpoint: model=model, optimizer=optimizer.")
        self._run, self._folder = run, Folder(folder)
        self._root = tf.train.Checkpoint(**objects)
        self._saves = Saves(run, self._folder, keep)
        self._extra_state = ExtraState(run)

    @property
    def latest(self) -> str | None:
        """Path of the last checkpoint in the folder, as this machine sees it; None: there is none."""
        return self._folder.latest()

    def save(self, step: int | None = None, *, background: bool = False) -> str | None:
        """Saves the values between two steps; every worker calls it, and only the chief writes.

        In the background, the call returns when all values are in files, before the system has flushed these to the
        disk. Training can continue, and the values use no memory of this process. A write error is raised by the next
        save, by `wait`, or at the end of the run, which waits for the save.

        If only the chief calls it, the others do not wait for it. Asynchronous steps may then write during the save, so
        that some values include their writes and others do not.

        Args:
            step: the number of steps done; returned by `restore`.
            background: True to return before the checkpoint is on the disk and has its name.

        Returns:
            The path that the checkpoint has, or will have, as TensorFlow reads it; None on all workers but the chief.

        Raises:
            CheckpointError: it cannot be written; earlier checkpoints are unchanged. Raised on all workers.
        """
        return self.save_with(Content, step, background)

    def save_with(
        self,
        extra: Callable[[], Content],
        step: int | None,
        background: bool,
        is_certain: bool = False,
        script_state: Callable[[], Any] = draws_now,
    ) -> str | None:
        """Saves like `save`, with extra content, which is computed only on the chief.

        Args:
            extra: returns the extra content.
            step: the argument of `save`.
            background: the argument of `save`.
            is_certain: True if all workers are known to make this call.
            script_state: returns the state of a worker's script; called on each worker.
        """
        self._prepare()
        above = self._count()
        return self._run.chief.save(
            lambda: self._saves.save(lambda n: self._content(n, step, extra()), background, above),
            is_certain,
            script_state,
        )

    def wait(self) -> None:
        """Returns when the save in the background is on the disk.

        Raises:
            CheckpointError: it could not be written.
        """
        self._saves.wait()

    def restore(self, path: str | os.PathLike[str] | None = None) -> int | None:
        """Restores the objects from a checkpoint of AutoDist, of `tf.train.Checkpoint` or of a `Saver`.

        Every worker calls it, between steps or before the first, and all restore the checkpoint that the chief has
        found. State outside the objects, such as the script's own step counter, must be set from the return value.

        Args:
            path: a path that `save` has returned; None: the last checkpoint in the folder.

        Returns:
            The step that was passed to `save`, 0 if there was none; None: the folder has no checkpoint yet.

        Raises:
            CheckpointMismatchError: the checkpoint was saved from other objects.
            CheckpointError: the checkpoint is damaged or missing; raised on all workers, and nothing has changed.
                Or this worker cannot read the checkpoint. Or only some workers call this method; raised on these, or,
                if it is called before the first step, on all workers in that step.
        """
        error = None
        found: Mapping[str, Any] = {}
        if self._run.index == 0:
            try:
                self._saves.wait()
                found = self._find(path)
            except CheckpointError as raised:
                error, found = raised, {"error": str(raised)}
        checkpoint = json.loads(self._run.coordination.share_text(json.dumps(found), RESTORE, is_certain=False))
        if error is not None or "error" in checkpoint:
            raise error or CheckpointError(checkpoint["error"])
        if not checkpoint:
            return None
        require_seen(self._run.index, checkpoint["prefix"], checkpoint["index"])
        self._assign(checkpoint["prefix"])
        self._extra_state.resume(
            checkpoint["prefix"], checkpoint["about"], is_same=self._run.steps.strategy is not None
        )
        resume_draws(self._extra_state.script(checkpoint["prefix"], checkpoint["about"]))
        self._run.step = self._run.saved_step = int(checkpoint["about"].get("step", 0))
        self._run.saved_as = checkpoint["prefix"]
        return self._run.step

    # -- saving ----------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Locks the folder for this run, on the chief; without this call, the first save does.

        Raises:
            CheckpointError: another process has claimed it, or it cannot be written.
        """
        if self._run.index == 0:
            self._folder.claim()

    def _prepare(self) -> None:
        """Called on every worker before a save."""

    def _count(self) -> int:
        """Returns the number of the last checkpoint according to the objects."""
        return int(self._root.save_counter)

    def _content(self, number: int, step: int | None, extra: Content) -> Content:
        self._root.save_counter.assign(number)
        objects = SavedObjects.of(self._root)
        graph = objects.graph.SerializeToString(deterministic=True)
        values = [Value(value.key, value.read, self._stored(value.variable)) for value in objects.values.values()]
        return Content(
            [*values, Value(GRAPH_KEY, lambda: tf.constant(graph))], {"step": step or 0, **extra.about}, extra.files
        )

    def _stored(self, variable: tf.Variable | None) -> StoredVariable | None:
        tracked = None if variable is None else self._run.tracker.of(variable)
        return tracked.stored if tracked is not None and tracked.may_be_behind else None

    # -- restoring -------------------------------------------------------------------------------------------------

    def _find(self, path: str | os.PathLike[str] | None) -> dict[str, Any]:
        """On the chief, finds a checkpoint and checks that it can be restored; returns {} if there is none yet."""
        prefix = self._folder.latest() if path is None else os.path.abspath(os.path.expanduser(path))
        if prefix is None:
            return {}
        about = read_whole(prefix)
        self._require_fits(prefix)
        entries = {key: value for key, value in about.items() if key != "files"}
        return {"prefix": prefix, "index": digest(f"{prefix}.index"), "about": entries}

    def _require_fits(self, prefix: str) -> None:
        """Checks that a checkpoint can be restored here.

        Raises:
            CheckpointMismatchError: the checkpoint was saved from other objects; the message names all differences.
        """
        self._matched(prefix)

    def _matched(self, prefix: str) -> tuple[SavedObjects, dict[str, str]]:
        """Returns the objects, and maps the key of each of their values to the saved key."""
        objects, graph = SavedObjects.of(self._root), saved_graph(prefix)
        if graph is not None and build_optimizers(objects, graph):
            objects = SavedObjects.of(self._root)
        return objects, require_same(prefix, objects, graph)

    def _assign(self, prefix: str) -> None:
        objects, keys = self._matched(prefix)
        states, reader = objects.python_states, tf.train.load_checkpoint(prefix)
        if any(objects.values[key].variable is None and key not in states for key in keys):
            self._root.restore(prefix).expect_partial()  # for example a table; a save counter may be missing
            return
        in_session: list[tuple[str, TrackedVariable]] = []
        in_process: list[KeyedVariable] = []
        before_steps: list[KeyedVariable] = []
        for key, name in keys.items():
            variable = objects.values[key].variable
            if variable is None:
                states[key].deserialize(reader.get_tensor(name))
            elif (tracked := self._in_session(variable)) is not None:
                in_session.append((name, tracked))
            else:
                is_used = self._run.tracker.of(variable) is not None
                (in_process if is_used else before_steps).append(KeyedVariable(name, variable))
        read_into_process(prefix, in_process)
        read_into_process(prefix, before_steps, self._run.divides_variables)
        if in_session:
            self._read_into_session(prefix, [(name, tracked.stored) for name, tracked in in_session])
            for _, tracked in in_session:
                tracked.hand_over(is_same=False)

    def _in_session(self, variable: tf.Variable) -> TrackedVariable | None:
        """Returns the record of a variable that is already placed for its steps, so that it can be read there."""
        tracked = self._run.tracker.of(variable)
        return tracked if tracked is not None and tracked.is_settled and not tracked.is_aliased else None

    def _read_into_session(self, prefix: str, values: Sequence[tuple[str, StoredVariable]]) -> None:
        """Restores variables of the session from the given keys; every worker calls it."""

        def read() -> str:
            restore_session(self._run, prefix, values)
            return ""

        self._run.chief.do_while_all_wait(read)
