"""Background: the slow part of a save, made while training goes on."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import ClassVar

from autodist.errors import CheckpointError
from autodist.logs.error_text import words_of

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
