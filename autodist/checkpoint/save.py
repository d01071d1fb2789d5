"""Saves: writes a checkpoint of values on any worker, at once or with the slow part in the background."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import tensorflow as tf

from autodist.checkpoint.content import SIDE_FILE, Content, Value
from autodist.checkpoint.extra_state import ExtraState, digest_of_strategy
from autodist.checkpoint.files import READERS, ChecksummedWrites, Follow, nobody
from autodist.checkpoint.folder import Folder
from autodist.checkpoint.write import PartWriter, merge, write_from_process
from autodist.errors import CheckpointError
from autodist.graph.devices import cpu_of
from autodist.logs.formatting import words_of
from autodist.runs.restarts import is_gone
from autodist.runs.run import Run
from autodist.runtime.variables import StoredVariable
from autodist.versions import VERSION
from autodist.waits import join, start_thread

log = logging.getLogger("autodist")

_FULL = (errno.ENOSPC, errno.EDQUOT)

_MARK = Value(SIDE_FILE, lambda: tf.constant(True))


class Saves:
    """Saves the training state of a run into a folder.

    Args:
        run: the run with the values.
        folder: the folder of the checkpoints.
        keep: the number of checkpoints to keep.
    """

    def __init__(self, run: Run, folder: Folder, keep: int) -> None:
        self._run, self._folder, self._keep = run, folder, keep
        self._part_writer: PartWriter | None = None
        self._is_waited_for = False
        self._last_saved: str | None = None
        self._extra_state = ExtraState(run)

    def save(self, content: Callable[[int], Content], is_in_background: bool = False, above: int = 0) -> str:
        """Writes a checkpoint of the current values; called on the chief, while no worker is in a step.

        In the background, the call returns when all values are in files, before the system has flushed these to the
        disk. The values use no memory of this process. Flushing, checksums and renaming remain for the background.

        Args:
            content: returns the content for the number of the checkpoint.
            is_in_background: True to return at that point.
            above: lower bound of the checkpoint's number, in addition to the numbers in the folder.

        Returns:
            The path that the checkpoint has, or will have.

        Raises:
            CheckpointError: it cannot be written, or an earlier one in the background could not be.
        """
        self.wait()
        self._folder.claim()
        self._warn_if_removed()
        self._run.flush()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._translate_errors())
            made = stack.enter_context(self._folder.unfinished())
            number = max([above, *self._folder.numbers()]) + 1
            contents = content(number)
            prefix = os.path.join(made, "merged")
            values = [*contents.values, *self._extra_state.values(), _MARK]
            if is_in_background:
                parts, finished = self._write_parts(values, made), {}
            else:
                with ChecksummedWrites() as writes:
                    parts, finished = self._write_parts(values, made, writes.follow), writes.checksums()
            merge(parts, prefix)
            for suffix, write in {**contents.files, **self._extra_state.files()}.items():
                write(prefix + suffix)
            about = {"number": number, **self._about(), **self._extra_state.about(), **contents.about}
            if is_in_background:
                rest = stack.pop_all()
                self._wait_at_end()
                Background.of(self._folder.path).begin(lambda: self._publish(rest, prefix, number, about, 1, finished))
            else:
                self._publish(stack.pop_all(), prefix, number, about, READERS, finished)
        return self._folder.prefix(number)

    def wait(self) -> None:
        """Returns when the save in the background is on the disk.

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
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, tf.errors.OpError) as error:
            folder = self._folder.path
            if _is_missing(error):
                raise CheckpointError(
                    f"the checkpoint could not be written in {folder}, since that folder, or the new files in it, was "
                    f"removed meanwhile: {words_of(error)}. Find out what removes it, or name another folder."
                ) from error
            raise CheckpointError(
                f"the checkpoint could not be written in {folder}; earlier ones are unchanged: "
                f"{words_of(error)}. {_mend(error)}, or name another folder."
            ) from error

    def _warn_if_removed(self) -> None:
        """Warns if the last checkpoint of this run was removed, so that the run could not restart from it."""
        if is_gone(self._last_saved):
            log.warning("%s, the last checkpoint of this run, was removed; find out what removes it.", self._last_saved)

    def _write_parts(self, values: Iterable[Value], folder: str, follow: Follow = nobody) -> list[str]:
        in_session: dict[str, StoredVariable] = {}
        in_process: list[tuple[str, Callable[[], tf.Tensor]]] = []
        for value in values:
            if value.stored is not None:
                in_session[value.key] = value.stored
            else:
                in_process.append((value.key, value.read))
        parts: list[str] = []
        if in_session:
            parts = self._run.guard(self._writer().write, in_session, folder, follow, self._run.chief.all_wait)
        return [*parts, *write_from_process(in_process, folder, follow)]

    def _writer(self) -> PartWriter:
        if self._part_writer is None:
            run = self._run
            file_device = functools.partial(cpu_of, workers=run.workers)
            self._part_writer = PartWriter(run.graph_runners.control, run.variable_slices, file_device)
        return self._part_writer

    def _about(self) -> dict[str, Any]:
        """Returns the side file's entries for every run; a run that resumes may have another strategy and seed."""
        strategy = self._run.steps.strategy
        return {
            "step": 0,
            "seed": self._run.seed,
            "workers": self._run.workers,
            "replicas": len(self._run.spec.replicas),
            "strategy": strategy and {"builder": strategy.builder, "sha256": digest_of_strategy(strategy)},
            **self._run.steps.choices.about(),
            "autodist": VERSION,
            "tensorflow": tf.__version__,
        }


def _is_missing(error: OSError | tf.errors.OpError) -> bool:
    return isinstance(error, FileNotFoundError | tf.errors.NotFoundError)


def _mend(error: OSError | tf.errors.OpError) -> str:
    number = getattr(error, "errno", None)
    if isinstance(error, tf.errors.OutOfRangeError) or number == errno.EFBIG:  # the first is TensorFlow's for EFBIG
        return "Raise the limit on the size of a file (`ulimit -f`)"
    if isinstance(error, tf.errors.ResourceExhaustedError) or number in _FULL:
        return "Free some space there"
    return "Check its disk"


_NICENESS = 15
"""Minimum nice value of the thread. Next to a training step on its core it gets a thirtieth of it, at 10 a tenth."""


class Background:
    """Background work of this process for one folder, one task at a time."""

    _of: ClassVar[dict[str, Background]] = {}

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @classmethod
    def of(cls, folder: str) -> Background:
        """Returns the instance for a folder; all savers of this process share it."""
        return cls._of.setdefault(os.path.realpath(folder), cls())

    def begin(self, act: Callable[[], None]) -> None:
        """Runs a task in a new thread; the previous one must be over.

        Args:
            act: the task; the next `wait` raises its exception.
        """
        assert self._thread is None, "`wait` comes before it"
        self._thread = start_thread("checkpoint", self._do, act)

    def wait(self) -> None:
        """Returns when no task runs.

        Raises:
            CheckpointError: the task failed; raised once.
        """
        if self._thread is not None:
            join(self._thread)
            self._thread = None
        error, self._error = self._error, None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(
                f"a checkpoint could not be written in the background, and earlier ones are unchanged: "
                f"{type(error).__name__}: {words_of(error)}. Save in the foreground to see the traceback."
            ) from error

    def _do(self, act: Callable[[], None]) -> None:
        with contextlib.suppress(OSError, AttributeError):  # a system without thread priorities
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
        try:
            act()
        except Exception as error:  # noqa: BLE001 - raised by `wait`
            self._error = error
