"""Checkpoints: what a script makes with `ad.checkpoint`, to save what it trains and to go on from there."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from autodist.checkpoint.folder import Folder, digest
from autodist.checkpoint.objects import GRAPH_KEY, SavedObjects, build_optimizers
from autodist.checkpoint.read import read_about, require_same, require_whole, saved_graph
from autodist.checkpoint.write import PartWriter, merge, write_here
from autodist.errors import CheckpointError
from autodist.graph.devices import cpu_of
from autodist.proto import strategy_pb2
from autodist.run import RESTORE, Run
from autodist.runtime.variables import Kept


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
        self._run, self._folder, self._keep = run, Folder(folder), keep
        self._root = tf.train.Checkpoint(**objects)
        self._part_writer: PartWriter | None = None

    @property
    def latest(self) -> str | None:
        """Path of the last checkpoint in the folder, as this machine sees it; None: there is none."""
        return self._folder.latest()

    def save(self, step: int | None = None) -> str | None:
        """Saves all values as they are between two steps; all workers call it, and the chief alone writes.

        Where the chief alone calls it, the others do not wait for it: what asynchronous steps write meanwhile may be
        in some values and not in others.

        Args:
            step: how many were made, for whoever restores it.

        Returns:
            The path of the checkpoint, as TensorFlow reads it; None on another worker than the chief.

        Raises:
            CheckpointError: it cannot be written; those that were there are as they were. On all workers.
        """
        return self._run.chief_does("checkpoint", lambda: self._write(step))

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
                found = self._find(path)
            except CheckpointError as raised:
                error, found = raised, {"error": str(raised)}
        told = json.loads(self._run.share(json.dumps(found), RESTORE, is_certain=False))
        if error is not None or "error" in told:
            raise error or CheckpointError(told["error"])
        if not told:
            return None
        self._require_seen(told["prefix"], told["index"])
        self._assign(told["prefix"])
        return int(told["step"])

    # -- saving ----------------------------------------------------------------------------------------------------

    def _write(self, step: int | None) -> str:
        self._folder.claim()
        self._run.land()
        try:
            with self._folder.unfinished() as made:
                number = max(int(self._root.save_counter), *self._folder.numbers(), 0) + 1
                self._root.save_counter.assign(number)
                prefix = os.path.join(made, "merged")
                merge(self._write_parts(made), prefix)
                path = self._folder.publish(prefix, number, self._about(number, step))
            self._folder.keep(self._keep)
        except (OSError, tf.errors.OpError) as error:
            raise CheckpointError(
                f"the checkpoint could not be written in {self._folder.path}, where earlier ones are as they were: "
                f"{error}. Make room there, or name another folder."
            ) from error
        return path

    def _write_parts(self, folder: str) -> list[str]:
        objects = SavedObjects.of(self._root)
        in_session: dict[str, Kept] = {}
        here: list[tuple[str, Callable[[], tf.Tensor]]] = []
        for value in objects.values.values():
            tracked = None if value.variable is None else self._run.tracker.of(value.variable)
            if tracked is not None and tracked.is_behind:
                in_session[value.key] = tracked.kept
            else:
                here.append((value.key, value.read))
        graph = objects.graph.SerializeToString(deterministic=True)
        here.append((GRAPH_KEY, lambda: tf.constant(graph)))
        parts = self._run.guard(self._writer().write, in_session, folder) if in_session else []
        return [*parts, *write_here(here, folder)]

    def _writer(self) -> PartWriter:
        if self._part_writer is None:
            workers = self._run.workers
            self._part_writer = PartWriter(
                self._run.host.beside(), self._run.pieces, lambda worker: cpu_of(worker, workers)
            )
        return self._part_writer

    def _about(self, number: int, step: int | None) -> dict[str, Any]:
        """What the side file says of the run; where another one goes on, it may have another strategy and seed."""
        strategy = self._run.strategy
        return {
            "number": number,
            "step": step or 0,
            "seed": self._run.seed,
            "workers": self._run.workers,
            "replicas": len(self._run.spec.replicas),
            "strategy": strategy and {"builder": strategy.builder, "sha256": _digest_of(strategy)},
            "autodist": importlib.metadata.version("autodist"),
            "tensorflow": tf.__version__,
        }

    # -- restoring -------------------------------------------------------------------------------------------------

    def _find(self, path: str | os.PathLike[str] | None) -> dict[str, Any]:
        """On the chief, a checkpoint that can be restored; nothing where there is none yet."""
        prefix = self._folder.latest() if path is None else os.path.abspath(os.path.expanduser(path))
        if prefix is None:
            return {}
        about = read_about(prefix)
        require_whole(prefix, about)
        self._matched(prefix)
        return {"prefix": prefix, "index": digest(f"{prefix}.index"), "step": about.get("step", 0)}

    def _matched(self, prefix: str) -> tuple[SavedObjects, dict[str, str], bool]:
        """The objects, by key of each of their values the saved one's, and whether a graph of objects was saved."""
        objects, graph = SavedObjects.of(self._root), saved_graph(prefix)
        if graph is not None and build_optimizers(objects, graph):
            objects = SavedObjects.of(self._root)
        return objects, require_same(prefix, objects, graph), graph is not None

    def _require_seen(self, prefix: str, index: str) -> None:
        """Passes where this worker's machine has the checkpoint that the chief has found."""
        path = f"{prefix}.index"
        if self._run.index > 0 and not (os.path.exists(path) and digest(path) == index):
            raise CheckpointError(
                f"worker {self._run.index} does not see {prefix}, which the chief has found. Keep checkpoints in a "
                "folder that all machines share, or copy them to each before the script starts, as `sync` does."
            )

    def _assign(self, prefix: str) -> None:
        objects, keys, has_graph = self._matched(prefix)
        if has_graph:
            self._root.restore(prefix).expect_partial()  # a save counter may be missing, and nothing else
            return
        reader = tf.train.load_checkpoint(prefix)
        for key, name in keys.items():
            variable = objects.values[key].variable
            assert variable is not None, "nothing else is found by its name"
            variable.assign(reader.get_tensor(name))


def _digest_of(strategy: strategy_pb2.Strategy) -> str:
    return hashlib.sha256(strategy.SerializeToString(deterministic=True)).hexdigest()
