"""Saves: makes a checkpoint of values, wherever they lie, at once or with its slow part in the background."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import tensorflow as tf

from autodist.checkpoint.checksummed_writes import ChecksummedWrites, Follow, nobody
from autodist.checkpoint.checksums import READERS
from autodist.checkpoint.content import SIDE_FILE, Content, Value
from autodist.checkpoint.extra_state import ExtraState, digest_of_strategy
from autodist.checkpoint.folder import Folder
from autodist.checkpoint.write import PartWriter, merge, write_here
from autodist.errors import CheckpointError
from autodist.graph.devices import cpu_of
from autodist.logs.formatting import words_of
from autodist.runs.restarts import is_gone
from autodist.runs.run import Run
from autodist.runtime.variables import Kept

log = logging.getLogger("autodist")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_MARK = Value(SIDE_FILE, lambda: tf.constant(True))


class Saves:
    """Saves what a run trains into a folder.

    Args:
        run: whose values they are.
        folder: of the checkpoints.
        keep: how many stay there.
    """

    def __init__(self, run: Run, folder: Folder, keep: int) -> None:
        self._run, self._folder, self._keep = run, folder, keep
        self._part_writer: PartWriter | None = None
        self._is_waited_for = False
        self._last_saved: str | None = None
        self._beside = ExtraState(run)

    def save(self, content: Callable[[int], Content], is_in_background: bool = False, above: int = 0) -> str:
        """Writes a checkpoint of the values as they are now; on the chief, while nobody is in a step.

        In the background, all values are in files when it returns, which the system has yet to bring to the disk: they
        take no memory of this process. What is left to do is to wait for that, to compute checksums and to name them.

        Args:
            content: gives what is saved, told the number of the checkpoint.
            is_in_background: whether it returns then.
            above: which number the checkpoint's is above, whatever is in the folder.

        Returns:
            The path that the checkpoint has, or will have.

        Raises:
            CheckpointError: it cannot be written, or an earlier one could not be in the background.
        """
        self.wait()
        self._folder.claim()
        self._tell_if_gone()
        self._run.land()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._telling())
            made = stack.enter_context(self._folder.unfinished())
            number = max([above, *self._folder.numbers()]) + 1
            told = content(number)
            prefix = os.path.join(made, "merged")
            values = [*told.values, *self._beside.values(), _MARK]
            if is_in_background:
                parts, finished = self._write_parts(values, made), {}
            else:
                with ChecksummedWrites() as trail:
                    parts, finished = self._write_parts(values, made, trail.follow), trail.checksums()
            merge(parts, prefix)
            for suffix, write in {**told.files, **self._beside.files()}.items():
                write(prefix + suffix)
            about = {"number": number, **self._about(), **self._beside.about(), **told.about}
            if is_in_background:
                rest = stack.pop_all()
                self._wait_at_end()
                Background.of(self._folder.path).begin(lambda: self._publish(rest, prefix, number, about, 1, finished))
            else:
                self._publish(stack.pop_all(), prefix, number, about, READERS, finished)
        return self._folder.prefix(number)

    def wait(self) -> None:
        """Returns when what is saved in the background is on the disk.

        Raises:
            CheckpointError: it could not be written.
        """
        Background.of(self._folder.path).wait()

    def _publish(
        self,
        around: contextlib.ExitStack,
        prefix: str,
        number: int,
        about: Mapping[str, Any],
        readers: int,
        finished: Mapping[int, str],
    ) -> None:
        with around:
            self._folder.publish(prefix, number, about, readers, finished)
            self._run.saved_step, self._run.saved_as = int(about["step"]), self._folder.prefix(number)
            self._last_saved = self._run.saved_as
            self._folder.keep(self._keep)

    def _wait_at_end(self) -> None:
        if not self._is_waited_for:
            self._is_waited_for = True
            self._run.end.before.append(self.wait)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except (OSError, tf.errors.OpError) as error:
            folder = self._folder.path
            if _is_missing(error):
                raise CheckpointError(
                    f"the checkpoint could not be written in {folder}, since that folder, or the new files in it, was "
                    f"removed meanwhile: {words_of(error)}. See what removes it, or name another folder."
                ) from error
            raise CheckpointError(
                f"the checkpoint could not be written in {folder}, where earlier ones are as they were: "
                f"{words_of(error)}. {_mend(error)}, or name another folder."
            ) from error

    def _tell_if_gone(self) -> None:
        """Warns of a checkpoint that this run has saved, from which it could not start again."""
        if is_gone(self._last_saved):
            log.warning("%s, which this run has saved last, was removed; see what removes it.", self._last_saved)

    def _write_parts(self, values: Iterable[Value], folder: str, follow: Follow = nobody) -> list[str]:
        in_session: dict[str, Kept] = {}
        here: list[tuple[str, Callable[[], tf.Tensor]]] = []
        for value in values:
            if value.kept is not None:
                in_session[value.key] = value.kept
            else:
                here.append((value.key, value.read))
        parts: list[str] = []
        if in_session:
            parts = self._run.guard(self._writer().write, in_session, folder, follow, self._run.chief.all_wait)
        return [*parts, *write_here(here, folder, follow)]

    def _writer(self) -> PartWriter:
        if self._part_writer is None:
            workers = self._run.workers
            self._part_writer = PartWriter(
                self._run.graph_runners.beside, self._run.pieces, lambda worker: cpu_of(worker, workers)
            )
        return self._part_writer

    def _about(self) -> dict[str, Any]:
        """What the side file says of every run; where another one goes on, it may have another strategy and seed."""
        strategy = self._run.strategy
        return {
            "step": 0,
            "seed": self._run.seed,
            "workers": self._run.workers,
            "replicas": len(self._run.spec.replicas),
            "strategy": strategy and {"builder": strategy.builder, "sha256": digest_of_strategy(strategy)},
            "autodist": importlib.metadata.version("autodist"),
            "tensorflow": tf.__version__,
        }


def _is_missing(error: OSError | tf.errors.OpError) -> bool:
    return isinstance(error, FileNotFoundError | tf.errors.NotFoundError)


def _mend(error: OSError | tf.errors.OpError) -> str:
    # What a file may not grow by, TensorFlow has as what is out of range.
    is_full = isinstance(error, tf.errors.ResourceExhaustedError | tf.errors.OutOfRangeError)
    if is_full or getattr(error, "errno", None) in _FULL:
        return "Make room there"
    return "See whether its disk is well"


_NICENESS = 15
"""Of the thread, at least: beside a training step that wants its core it has a thirtieth of that, at 10 a tenth."""


class Background:
    """What this process does in the background for one folder, one thing at a time."""

    _of: ClassVar[dict[str, Background]] = {}

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @classmethod
    def of(cls, folder: str) -> Background:
        """The one of a folder, whoever in this process saves there."""
        return cls._of.setdefault(os.path.realpath(folder), cls())

    @property
    def is_under_way(self) -> bool:
        """Whether something is being done."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, act: Callable[[], None]) -> None:
        """Does something in a thread of its own; what was begun before has to be over.

        Args:
            act: what is done; what it raises the next `wait` raises.
        """
        assert self._thread is None, "`wait` comes before it"
        self._thread = threading.Thread(target=self._do, args=(act,), name="autodist-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns when nothing is under way.

        Raises:
            CheckpointError: what was could not be done; raised once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(
                f"a checkpoint could not be written in the background, and those before it are as they were: "
                f"{type(error).__name__}: {words_of(error)}. Save in the foreground to see where."
            ) from error

    def _do(self, act: Callable[[], None]) -> None:
        with contextlib.suppress(OSError, AttributeError):  # a system whose threads have no priority of their own
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
        try:
            act()
        except Exception as error:  # noqa: BLE001 - all of it belongs to who waits
            self._error = error
