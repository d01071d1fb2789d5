"""Removes the folders of unfinished checkpoints if SIGTERM ends the process, which by default ends it at once."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from types import FrameType
from typing import ClassVar


class RemovedOnTermination:
    """The folders of this process that SIGTERM removes before it ends the process.

    While there are any, SIGTERM has a handler, if the process has no other one. Only the main thread can set and remove
    it, so it may stay after a save in the background; it then ends the process as by default.
    """

    _folders: ClassVar[set[str]] = set()
    _process: ClassVar[int] = 0

    @classmethod
    def add(cls, folder: str) -> None:
        """Adds a folder."""
        cls._folders.add(folder)
        if _is_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            cls._process = os.getpid()
            signal.signal(signal.SIGTERM, cls._end)

    @classmethod
    def discard(cls, folder: str) -> None:
        """Removes a folder from the set, which no longer exists; callable from any thread."""
        cls._folders.discard(folder)
        cls.restore_default()

    @classmethod
    def restore_default(cls) -> None:
        """Restores the default of SIGTERM, if no folder needs the handler and this is the main thread."""
        if _is_main_thread() and not cls._folders and signal.getsignal(signal.SIGTERM) == cls._end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @classmethod
    def _end(cls, number: int, frame: FrameType | None) -> None:
        if os.getpid() == cls._process:  # else this process was forked from the one that saves
            for folder in list(cls._folders):
                shutil.rmtree(folder, ignore_errors=True)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
