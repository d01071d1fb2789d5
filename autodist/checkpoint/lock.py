"""FolderLock: one run at a time writes checkpoints into a folder; another is told whose it is.

The file `checkpoint.lock` is locked by `flock`, which the system undoes when the process ends, however it ends, and
which reaches other machines over NFS, Lustre and their like. In it stands who has it. A mount may keep locks to its own
machine: what another machine has written there counts then, since nobody can ask that.
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
"""Options of mounts of NFS and Lustre, whose locks other machines do not see."""


@dataclass(frozen=True)
class Owner:
    """The process that has a folder.

    Attributes:
        host: its machine.
        pid: its process there.
        since: when it took the folder, in UTC.
        began: when the process began, as its system counts; by it another process of the same number is told apart.
    """

    host: str
    pid: int
    since: str
    began: str

    @classmethod
    def this_process(cls) -> Self:
        """The owner that this process is."""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        return cls(socket.gethostname(), os.getpid(), since, _began(os.getpid()))

    @classmethod
    def told(cls, content: bytes) -> Self | None:
        """Whom a lock's file names; None: nobody, or it is not whole."""
        try:
            found = json.loads(content)
            return cls(str(found["host"]), int(found["pid"]), str(found["since"]), str(found["began"]))
        except (ValueError, KeyError, TypeError):
            return None

    @property
    def is_here(self) -> bool:
        """Whether it is of this machine."""
        return self.host == socket.gethostname()

    @property
    def is_this(self) -> bool:
        """Whether it is this process, maybe before it began anew (`exec`), by which locks go."""
        return self.is_here and self.pid == os.getpid() and _began(self.pid) == self.began

    @property
    def has_ended(self) -> bool:
        """Whether it is known to be over: its machine is this one, which has no such process any more."""
        return self.is_here and _began(self.pid) != self.began

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class FolderLock:
    """Holds a folder for this process, from `take` until the process ends or `release`.

    Args:
        folder: that is there.
    """

    _held: ClassVar[dict[str, FolderLock]] = {}

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(os.path.realpath(folder), NAME)
        self._file: int | None = None

    @classmethod
    def take(cls, folder: str) -> FolderLock:
        """Takes the lock of a folder for this process, which may have it already, by another path, too.

        Raises:
            CheckpointError: another process has it.
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
        """Lets go of all that this process holds."""
        for lock in list(cls._held.values()):
            lock.release()

    def release(self) -> None:
        """Lets go of the folder, and takes the file away."""
        if self._file is not None:
            if self._is_there():
                with contextlib.suppress(OSError):  # the folder is gone, or not to be written any more
                    os.unlink(self._path)
            self._let_go()
        self._held.pop(self._path, None)

    def _move_to(self, path: str) -> None:
        """The folder that it holds is found there: it was moved since, or is mounted twice."""
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
                if is_mine and self._is_there():  # else its owner has taken it away meanwhile
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
        """Whether the file is locked for this process; another's owner is named."""
        owner = Owner.told(os.pread(file, 4096, 0))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not self._is_there():
                return False
            raise self._refusal(owner) from None
        except OSError:  # a file system that knows no locks: what the file says counts
            if owner is not None and not (owner.has_ended or owner.is_this):
                raise self._refusal(owner) from None
            return True
        owner = Owner.told(os.pread(file, 4096, 0))
        if owner is not None and not owner.is_here and _keeps_locks_to_itself(self._path):
            raise self._refusal(owner)
        return True

    def _refusal(self, owner: Owner | None) -> CheckpointError:
        folder = os.path.dirname(self._path)
        whose = "another process" if owner is None else str(owner)
        if owner is not None and owner.has_ended:
            whose += ", which has ended and left a process of its own that holds it"
        mend = "Name another folder, or end that run"
        if owner is not None and not owner.is_here:
            mend += f"; if it is over, and its machine cannot say so, remove {self._path}"
        return CheckpointError(f"{folder} is in use by {whose}, which saves its checkpoints there. {mend}.")

    def _is_there(self) -> bool:
        """Whether the file that is open here is the one that others find."""
        return self._is_at(self._path)

    def _is_at(self, path: str) -> bool:
        if self._file is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(path))
        except OSError:  # it was removed, or something else stands there where its folder was
            return False


def _began(pid: int) -> str:
    """When a process began; "" if there is none, or its system does not say."""
    try:
        with open(f"/proc/{pid}/stat") as opened:
            return opened.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _keeps_locks_to_itself(path: str) -> bool:
    """Whether other machines do not see locks that are taken here."""
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
    """In a process that was forked: the lock is its parent's, and goes with it."""
    for lock in FolderLock._held.values():
        lock._let_go()
    FolderLock._held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
atexit.register(FolderLock.release_all)
