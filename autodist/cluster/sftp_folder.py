"""A folder on another machine, made like one here over SFTP: only what changed, each file whole or not at all.

A file counts as unchanged where size and time are the same. What was brought before and is gone here is removed there,
unless it was changed there since; nothing else is. A record in the folder there says what was brought.
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO

import paramiko

from autodist.cluster.folder import PART, RECORD, LocalFile
from autodist.errors import ClusterError


@dataclass(frozen=True)
class Brought:
    """What bringing a folder to one machine has done.

    Attributes:
        files: that were brought.
        bytes: of these.
        alike: files that were there already.
        removed: that had been brought before and are gone here.
        kept: likewise, but changed there since.
    """

    files: int = 0
    bytes: int = 0
    alike: int = 0
    removed: int = 0
    kept: tuple[str, ...] = ()


class StoppedError(Exception):
    """The run was ended while its folder was being brought."""


@dataclass
class Bringing:
    """Brings a folder to one machine, once.

    Attributes:
        sftp: to it.
        source: the folder here.
        target: the folder there.
        files: by path below it.
        is_stopped: whether to end.
        free: bytes that are free there.
    """

    sftp: paramiko.SFTPClient
    source: str
    target: str
    files: Mapping[str, LocalFile]
    is_stopped: Callable[[], bool]
    free: Callable[[], int | None]
    _folders: dict[str, dict[str, paramiko.SFTPAttributes]] = field(default_factory=dict)

    def run(self) -> Brought:
        record = self._read_record()
        before = dict(record)
        alike = size = count = 0
        try:
            for path, file in self.files.items():
                if self._is_there(path, file):
                    alike += 1
                    continue
                self._bring(path, file)
                record[path] = [file.size, file.modified]
                count, size = count + 1, size + file.size
            removed, kept = self._remove_gone(record)
        finally:
            if record != before:
                self._write_record(record)
        return Brought(count, size, alike, removed, tuple(kept))

    def _is_there(self, path: str, file: LocalFile) -> bool:
        folder, name = posixpath.split(path)
        there = self._in_folder(folder).get(name)
        if there is None:
            return False
        if stat.S_ISLNK(there.st_mode or 0):  # of a folder that machines share, it is the same link as here
            with self._telling(posixpath.join(self.target, path)):
                there = self.sftp.stat(posixpath.join(self.target, path))
        if stat.S_ISDIR(there.st_mode or 0):
            where = posixpath.join(self.target, path)
            raise ClusterError(f"{where} is a folder there, and a file here; move it away, or `exclude` it here")
        is_executable = bool((there.st_mode or 0) & 0o100) == bool(file.mode & 0o100)
        return (there.st_size, there.st_mtime) == (file.size, file.modified) and is_executable

    def _in_folder(self, folder: str) -> dict[str, paramiko.SFTPAttributes]:
        """What is in a folder there, which is made if it is not there."""
        if folder not in self._folders:
            where = posixpath.join(self.target, folder) if folder else self.target
            with self._telling(where):
                self._make_folder(where)
                self._folders[folder] = {entry.filename: entry for entry in self.sftp.listdir_attr(where)}
        return self._folders[folder]

    def _make_folder(self, where: str) -> None:
        try:
            self.sftp.stat(where)
        except FileNotFoundError:
            self._make_folder(posixpath.dirname(where))
            with self._telling(where):
                self.sftp.mkdir(where)

    def _bring(self, path: str, file: LocalFile) -> None:
        where = posixpath.join(self.target, path)
        folder, name = posixpath.split(where)
        part = posixpath.join(folder, f".{name}{PART}{secrets.token_hex(4)}")
        with _reading(file) as content, self._telling(where, file.size):
            try:
                self.sftp.putfo(content, part, file.size, callback=self._go_on)
                self.sftp.chmod(part, file.mode)
                self.sftp.utime(part, (file.modified, file.modified))
                self.sftp.posix_rename(part, where)
            except BaseException:
                with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                    self.sftp.remove(part)
                raise

    def _go_on(self, done: int, total: int) -> None:
        if self.is_stopped():
            raise StoppedError

    def _remove_gone(self, record: dict[str, list[int]]) -> tuple[int, list[str]]:
        """Removes what was brought before and is gone here; what was changed there since stays, and is nobody's."""
        removed, kept = 0, []
        for path in [path for path in record if path not in self.files and self._is_gone(path)]:
            where = posixpath.join(self.target, path)
            brought = record.pop(path)
            with self._telling(where):
                there = self._lstat(where)
                if there is None:
                    continue
                if [there.st_size, there.st_mtime] != brought:
                    kept.append(where)
                    continue
                self.sftp.remove(where)
                removed += 1
        return removed, kept

    def _lstat(self, where: str) -> paramiko.SFTPAttributes | None:
        try:
            return self.sftp.lstat(where)
        except FileNotFoundError:
            return None

    def _is_gone(self, path: str) -> bool:
        """Whether a file is no longer here; one that is left out by now may be of use there."""
        return not os.path.lexists(os.path.join(self.source, path))

    def _read_record(self) -> dict[str, list[int]]:
        try:
            with self.sftp.open(posixpath.join(self.target, RECORD)) as file:
                return dict(json.loads(file.read()))
        except (OSError, ValueError, TypeError):
            return {}

    def _write_record(self, record: Mapping[str, list[int]]) -> None:
        where = posixpath.join(self.target, RECORD)
        with self._telling(where):
            with self.sftp.open(f"{where}{PART}", "w") as file:
                file.write(json.dumps(record))
            self.sftp.posix_rename(f"{where}{PART}", where)

    @contextlib.contextmanager
    def _telling(self, where: str, size: int = 0) -> Iterator[None]:
        """Tells what an error of SFTP means, which has few words."""
        try:
            yield
        except TimeoutError:
            raise
        except PermissionError as error:
            raise ClusterError(
                f"no right to write {where}: make its folder there, owned by the user who logs in, or give another "
                "`username`"
            ) from error
        except OSError as error:
            free = self.free()
            if free is not None and free < size + 4096:
                raise ClusterError(
                    f"no space for {where}: {size} bytes are needed and {free} free; free some there, or `exclude` more"
                ) from error
            raise ClusterError(
                f"{where} cannot be written: {error.strerror or error}; see whether a file there stands where a folder "
                "has to, and whether the user has reached a quota"
            ) from error


@contextlib.contextmanager
def _reading(file: LocalFile) -> Iterator[BinaryIO]:
    """The content of a file here."""
    try:
        content = open(file.path, "rb")  # noqa: SIM115  # what is done with it fails by itself
    except OSError as error:
        mend = "give yourself the right to read it, or `exclude` it under `sync`"
        raise ClusterError(f"{file.path} cannot be read here: {error.strerror}; {mend}") from error
    with content:
        yield content
