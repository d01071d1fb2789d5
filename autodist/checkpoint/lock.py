"""FolderLock: only one run at a time writes checkpoints into a folder; the error of another names the owner.

The file `checkpoint.lock` is locked with `flock`. The system releases the lock when the process ends in any way, and
the lock works across machines over NFS, Lustre and similar. The file names the owner. A mount may keep locks local to
its machine; then the content of the file counts, if another machine has written it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from typing import ClassVar, Self

from autodist.errors import CheckpointError

NAME = "checkpoint.lock"

_MOUNTS = "/proc/self/mountinfo"
_KEEPS_TO_ITSELF = ("nolock", "local_lock=all", "local_lock=flock", "localflock")
"""Mount options of NFS and Lustre under which other machines do not see the locks."""


@dataclass(frozen=True)
class Owner:
    """The process that has claimed a folder.

    Attributes:
        host: its machine.
        pid: its process id.
        since: the time of the claim, in UTC.
        began: the start time of the process in system ticks; distinguishes processes that reuse a pid.
    """

    host: str
    pid: int
    since: str
    began: str

    @classmethod
    def this_process(cls) -> Self:
        """Returns the owner for this process."""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        return cls(socket.gethostname(), os.getpid(), since, _began(os.getpid()))

    @classmethod
    def from_json(cls, content: bytes) -> Self | None:
        """Returns the owner named in a lock file; None: there is none, or the file is incomplete."""
        try:
            found = json.loads(content)
            return cls(str(found["host"]), int(found["pid"]), str(found["since"]), str(found["began"]))
        except (ValueError, KeyError, TypeError):
            return None

    @property
    def is_here(self) -> bool:
        """True if the owner is on this machine."""
        return self.host == socket.gethostname()

    @property
    def is_this(self) -> bool:
        """True if the owner is this process, possibly before a re-exec, which releases locks."""
        return self.is_here and self.pid == os.getpid() and _began(self.pid) == self.began

    @property
    def has_ended(self) -> bool:
        """True if the owner is known to have ended: its process no longer exists on this machine."""
        return self.is_here and _began(self.pid) != self.began

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class FolderLock:
    """Holds a folder for this process, from `take` until `release` or the end of the process.

    Args:
        folder: an existing folder.
    """

    _held: ClassVar[dict[str, FolderLock]] = {}

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(os.path.realpath(folder), NAME)
        self._file: int | None = None

    @classmethod
    def take(cls, folder: str) -> FolderLock:
        """Takes the lock of a folder; this process may already hold it, also under another path.

        Raises:
            CheckpointError: another process holds it.
            OSError: the folder cannot be written.
        """
        lock = cls(folder)
        for held in list(cls._held.values()):
            if held._is_at(lock._path):
                held._move_to(lock._path)
                return held
        if lock._path in cls._held:
            cls._held[lock._path]._let_go()
        lock._take()
        cls._held[lock._path] = lock
        return lock

    @classmethod
    def release_all(cls) -> None:
        """Releases all locks of this process."""
        for lock in list(cls._held.values()):
            lock.release()

    def release(self) -> None:
        """Releases the lock and removes its file."""
        if self._file is not None:
            if self._is_there():
                with contextlib.suppress(OSError):  # the folder was removed, or is no longer writable
                    os.unlink(self._path)
            self._let_go()
        self._held.pop(self._path, None)

    def _move_to(self, path: str) -> None:
        """Updates the path of a held folder, which was moved or is mounted twice."""
        self._held[path] = self._held.pop(self._path)
        self._path = path

    def _let_go(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _take(self) -> None:
        while True:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                is_mine = self._lock(self._file)
                if is_mine and self._is_there():  # else the previous owner has removed the file meanwhile
                    content = json.dumps(asdict(Owner.this_process())).encode()
                    os.ftruncate(self._file, 0)
                    os.pwrite(self._file, content, 0)
                    os.fsync(self._file)
                    return
            except BaseException:
                self._let_go()
                raise
            self._let_go()

    def _lock(self, file: int) -> bool:
        """Locks the file for this process; returns False if it was removed meanwhile. The error names the owner."""
        owner = Owner.from_json(os.pread(file, 4096, 0))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not self._is_there():
                return False
            raise self._refusal(owner) from None
        except OSError:  # a file system without locks: the content of the file counts
            if owner is not None and not (owner.has_ended or owner.is_this):
                raise self._refusal(owner) from None
            return True
        owner = Owner.from_json(os.pread(file, 4096, 0))
        if owner is not None and not owner.is_here and _keeps_locks_to_itself(self._path):
            raise self._refusal(owner)
        return True

    def _refusal(self, owner: Owner | None) -> CheckpointError:
        folder = os.path.dirname(self._path)
        whose = "another process" if owner is None else str(owner)
        if owner is not None and owner.has_ended:
            whose += ", which has ended, but a child process still holds the lock"
        mend = "Name another folder, or end that run"
        if owner is not None and not owner.is_here:
            mend += f"; if that run is over and its machine cannot be reached, remove {self._path}"
        return CheckpointError(f"{folder} is in use by {whose}, which saves its checkpoints there. {mend}.")

    def _is_there(self) -> bool:
        """Returns True if the open file is the one at the path."""
        return self._is_at(self._path)

    def _is_at(self, path: str) -> bool:
        if self._file is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(path))
        except OSError:  # it was removed, or its folder was replaced
            return False


def _began(pid: int) -> str:
    """Returns the start time of a process; "" if it does not exist or the system does not provide the time."""
    try:
        with open(f"/proc/{pid}/stat") as opened:
            return opened.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _keeps_locks_to_itself(path: str) -> bool:
    """Returns True if other machines do not see locks taken at a path."""
    try:
        with open(_MOUNTS) as opened:
            mounts = [line.split() for line in opened]
    except OSError:
        return False
    around = [fields for fields in mounts if os.path.commonpath([path, fields[4]]) == fields[4]]
    if not around:
        return False
    last = max(around, key=lambda fields: len(fields[4]))
    return any(option in _KEEPS_TO_ITSELF for option in last[-1].split(","))


def _leave_to_parent() -> None:
    """Drops the locks in a forked child: they belong to the parent, and end with it."""
    for lock in FolderLock._held.values():
        lock._let_go()
    FolderLock._held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
atexit.register(FolderLock.release_all)
