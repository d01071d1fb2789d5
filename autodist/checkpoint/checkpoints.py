"""Checkpoints: what a script makes with `ad.checkpoint`, to save what it trains and to go on from there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from autodist.checkpoint.content import Content, Value
from autodist.checkpoint.extra_state import ExtraState
from autodist.checkpoint.folder import Folder, digest
from autodist.checkpoint.objects import GRAPH_KEY, SavedObjects, build_optimizers
from autodist.checkpoint.read import read_about, require_same, require_seen, require_whole, saved_graph
from autodist.checkpoint.save import Saves
from autodist.checkpoint.script import draws_now, resume_draws
from autodist.checkpoint.slices import Here, read_here, read_into_session
from autodist.errors import CheckpointError
from autodist.graph.devices import cpu_of
from autodist.runs.coordination import RESTORE
from autodist.runs.run import Run
from autodist.runtime.variables import Kept, Tracked


class Checkpoints:
    """Saves objects of a script into a folder, and restores them; made by `AutoDist.checkpoint`.

    Args:
        run: in which they are trained.
        folder: of the checkpoints.
        keep: how many stay there; older ones are removed.
        objects: by name, as for `tf.train.Checkpoint`.
    """

    def __init__(self, run: Run, folder: str | os.PathLike[str], keep: int, objects: Mapping[str, Any]) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep!r}; it is how many checkpoints stay, at least 1.")
        if not objects:
            raise ValueError("name what is to be saved, as for tf.train.Checkpoint: model=model, optimizer=optimizer.")
        self._run, self._folder = run, Folder(folder)
        self._root = tf.train.Checkpoint(**objects)
        self._saves = Saves(run, self._folder, keep)
        self._beside = ExtraState(run)

    @property
    def latest(self) -> str | None:
        """Path of the last checkpoint in the folder, as this machine sees it; None: there is none."""
        return self._folder.latest()

    def save(self, step: int | None = None, *, background: bool = False) -> str | None:
        """Saves all values as they are between two steps; all workers call it, and the chief alone writes.

        In the background, all values are in files when it returns, which the system has yet to bring to the disk: they
        take no memory of this process, and training may go on. What could not be written the next save raises, or
        `wait`, or the end of the run, which waits for it.

        Where the chief alone calls it, the others do not wait for it: what asynchronous steps write meanwhile may be
        in some values and not in others.

        Args:
            step: how many were made, for whoever restores it.
            background: whether it returns before the checkpoint is on the disk and has its name.

        Returns:
            The path that the checkpoint has, or will have, as TensorFlow reads it; None on another worker than the
            chief.

        Raises:
            CheckpointError: it cannot be written; those that were there are as they were. On all workers.
        """
        return self.save_with(Content, step, background)

    def save_with(
        self,
        beside: Callable[[], Content],
        step: int | None,
        background: bool,
        is_certain: bool = False,
        tell: Callable[[], Any] = draws_now,
    ) -> str | None:
        """As `save`, with what else makes the checkpoint; that is asked for on the chief alone.

        Args:
            beside: gives it.
            step: as for `save`.
            background: as for `save`.
            is_certain: whether all workers are known to come to it.
            tell: what each worker saves of its script.
        """
        self._prepare()
        above = self._count()
        return self._run.chief.save(
            lambda: self._saves.save(lambda n: self._content(n, step, beside()), background, above),
            is_certain,
            tell,
        )

    def wait(self) -> None:
        """Returns when what is saved in the background is on the disk.

        Raises:
            CheckpointError: it could not be written.
        """
        self._saves.wait()

    def restore(self, path: str | os.PathLike[str] | None = None) -> int | None:
        """Gives the objects the values of a checkpoint: ours, or what `tf.train.Checkpoint` or a `Saver` has written.

        All workers call it, between steps or before the first, and all restore what the chief has found. What the
        script runs on besides, as a step it counts by itself, is returned.

        Args:
            path: as `save` returns it; None: the last one in the folder.

        Returns:
            The step that was given to `save`, 0 where none was; None: there is no checkpoint in the folder yet.

        Raises:
            CheckpointMismatchError: it was saved of other objects.
            CheckpointError: it is damaged or not there: on all workers, and nothing is changed then. Or this worker
                does not see it. Or not all workers call it: on those that do, or, before they have joined, on all in
                the first step.
        """
        error = None
        found: Mapping[str, Any] = {}
        if self._run.index == 0:
            try:
                self._saves.wait()
                found = self._find(path)
            except CheckpointError as raised:
                error, found = raised, {"error": str(raised)}
        told = json.loads(self._run.coordination.share(json.dumps(found), RESTORE, is_certain=False))
        if error is not None or "error" in told:
            raise error or CheckpointError(told["error"])
        if not told:
            return None
        require_seen(self._run.index, told["prefix"], told["index"])
        self._assign(told["prefix"])
        self._beside.resume(told["prefix"], told["about"], is_same=self._run.strategy is not None)
        resume_draws(self._beside.script(told["prefix"], told["about"]))
        self._run.step = self._run.saved_step = int(told["about"].get("step", 0))
        self._run.saved_as = told["prefix"]
        return self._run.step

    # -- saving ----------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """On the chief, makes the folder this run's, which the first save does else.

        Raises:
            CheckpointError: another has it, or it cannot be written.
        """
        if self._run.index == 0:
            self._folder.claim()

    def _prepare(self) -> None:
        """Called on every worker before it comes to a save."""

    def _count(self) -> int:
        """The number of the last checkpoint that the objects know of."""
        return int(self._root.save_counter)

    def _content(self, number: int, step: int | None, beside: Content) -> Content:
        self._root.save_counter.assign(number)
        objects = SavedObjects.of(self._root)
        graph = objects.graph.SerializeToString(deterministic=True)
        values = [Value(value.key, value.read, self._kept(value.variable)) for value in objects.values.values()]
        return Content(
            [*values, Value(GRAPH_KEY, lambda: tf.constant(graph))], {"step": step or 0, **beside.about}, beside.files
        )

    def _kept(self, variable: tf.Variable | None) -> Kept | None:
        tracked = None if variable is None else self._run.tracker.of(variable)
        return tracked.kept if tracked is not None and tracked.may_be_behind else None

    # -- restoring -------------------------------------------------------------------------------------------------

    def _find(self, path: str | os.PathLike[str] | None) -> dict[str, Any]:
        """On the chief, a checkpoint that can be restored; nothing where there is none yet."""
        prefix = self._folder.latest() if path is None else os.path.abspath(os.path.expanduser(path))
        if prefix is None:
            return {}
        about = read_about(prefix)
        require_whole(prefix, about)
        self._require_fits(prefix)
        told = {key: value for key, value in about.items() if key != "files"}
        return {"prefix": prefix, "index": digest(f"{prefix}.index"), "about": told}

    def _require_fits(self, prefix: str) -> None:
        """Passes a checkpoint that can be restored here.

        Raises:
            CheckpointMismatchError: it was saved of something else; names all that differs.
        """
        self._matched(prefix)

    def _matched(self, prefix: str) -> tuple[SavedObjects, dict[str, str]]:
        """The objects, and by key of each of their values the saved one's."""
        objects, graph = SavedObjects.of(self._root), saved_graph(prefix)
        if graph is not None and build_optimizers(objects, graph):
            objects = SavedObjects.of(self._root)
        return objects, require_same(prefix, objects, graph)

    def _assign(self, prefix: str) -> None:
        objects, keys = self._matched(prefix)
        states, reader = objects.python_states, tf.train.load_checkpoint(prefix)
        if any(objects.values[key].variable is None and key not in states for key in keys):
            self._root.restore(prefix).expect_partial()  # a table, say; of the rest a save counter may be missing
            return
        in_session: list[tuple[str, Tracked]] = []
        here: list[Here] = []
        for key, name in keys.items():
            variable = objects.values[key].variable
            if variable is None:
                states[key].deserialize(reader.get_tensor(name))
            elif (tracked := self._in_session(variable)) is not None:
                in_session.append((name, tracked))
            else:
                here.append(Here(name, variable))
        read_here(prefix, here)
        if in_session:
            self._read_into_session(prefix, [(name, tracked.kept) for name, tracked in in_session])
            for _, tracked in in_session:
                tracked.hand_over(is_same=False)

    def _in_session(self, variable: tf.Variable) -> Tracked | None:
        """The record of a variable that lies where a step wants it, so that it can be read there."""
        tracked = self._run.tracker.of(variable)
        return tracked if tracked is not None and tracked.is_settled and not tracked.is_aliased else None

    def _read_into_session(self, prefix: str, values: Sequence[tuple[str, Kept]]) -> None:
        """Gives what the session has the values of some keys; all workers call it."""
        workers, graph_runner, pieces = self._run.workers, self._run.graph_runners.beside, self._run.pieces

        def read() -> str:
            self._run.guard(
                read_into_session, graph_runner, pieces, lambda worker: cpu_of(worker, workers), prefix, values
            )
            return ""

        self._run.chief.do_while_all_wait(read)
