"""Synchronizes a folder to another machine over SFTP: copies only the files that changed, each of them atomically.

A file counts as unchanged if its size and time are the same. Files that were copied earlier and no longer exist here
are removed there, unless they were changed there since; no other file is removed. A record in the remote folder lists
the copied files.
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
class SyncResult:
    """The result of copying a folder to one machine.

    Attributes:
        files: number of copied files.
        bytes: their total size.
        unchanged: number of unchanged files.
        removed: number of removed files, which were copied earlier and no longer exist here.
        kept: paths of such files that were changed there since, and kept.
    """

    files: int = 0
    bytes: int = 0
    unchanged: int = 0
    removed: int = 0
    kept: tuple[str, ...] = ()


class StoppedError(Exception):
    """Raised when the run ends while its folder is being copied."""


@dataclass
class FolderCopy:
    """Copies a folder to one machine.

    Attributes:
        sftp: SFTP session to the machine.
        source: path of the local folder.
        target: path of the remote folder.
        files: local files by path below the folder.
        is_stopped: returns True to cancel.
        free: returns the free bytes of the remote file system, None if unknown.
    """

    sftp: paramiko.SFTPClient
    source: str
    target: str
    files: Mapping[str, LocalFile]
    is_stopped: Callable[[], bool]
    free: Callable[[], int | None]
    _folders: dict[str, dict[str, paramiko.SFTPAttributes]] = field(default_factory=dict)

    def run(self) -> SyncResult:
        record = self._read_record()
        before = dict(record)
        unchanged = size = count = 0
        try:
            for path, file in self.files.items():
                if self._is_there(path, file):
                    unchanged += 1
                    continue
                self._copy(path, file)
                record[path] = [file.size, file.modified]
                count, size = count + 1, size + file.size
            removed, kept = self._remove_gone(record)
        finally:
            if record != before:
                self._write_record(record)
        return SyncResult(count, size, unchanged, removed, tuple(kept))

    def _is_there(self, path: str, file: LocalFile) -> bool:
        folder, name = posixpath.split(path)
        there = self._in_folder(folder).get(name)
        if there is None:
            return False
        if stat.S_ISLNK(there.st_mode or 0):  # in a folder that the machines share, it is the local link itself
            with self._explaining_errors(posixpath.join(self.target, path)):
                there = self.sftp.stat(posixpath.join(self.target, path))
        if stat.S_ISDIR(there.st_mode or 0):
            where = posixpath.join(self.target, path)
            raise ClusterError(f"{where} is a folder there, and a file here; move it away, or `exclude` it here")
        is_executable = bool((there.st_mode or 0) & 0o100) == bool(file.mode & 0o100)
        return (there.st_size, there.st_mtime) == (file.size, file.modified) and is_executable

    def _in_folder(self, folder: str) -> dict[str, paramiko.SFTPAttributes]:
        """Returns the entries of a remote folder by name; creates the folder if it does not exist."""
        if folder not in self._folders:
            where = posixpath.join(self.target, folder) if folder else self.target
            with self._explaining_errors(where):
                self._make_folder(where)
                self._folders[folder] = {entry.filename: entry for entry in self.sftp.listdir_attr(where)}
        return self._folders[folder]

    def _make_folder(self, where: str) -> None:
        try:
            self.sftp.stat(where)
        except FileNotFoundError:
            self._make_folder(posixpath.dirname(where))
            with self._explaining_errors(where):
                self.sftp.mkdir(where)

    def _copy(self, path: str, file: LocalFile) -> None:
        where = posixpath.join(self.target, path)
        folder, name = posixpath.split(where)
        part = posixpath.join(folder, f".{name}{PART}{secrets.token_hex(4)}")
        with _reading(file) as content, self._explaining_errors(where, file.size):
            try:
                self.sftp.putfo(content, part, file.size, callback=self._check_stopped)
                self.sftp.chmod(part, file.mode)
                self.sftp.utime(part, (file.modified, file.modified))
                self.sftp.posix_rename(part, where)
            except BaseException:
                with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                    self.sftp.remove(part)
                raise

    def _check_stopped(self, done: int, total: int) -> None:
        if self.is_stopped():
            raise StoppedError

    def _remove_gone(self, record: dict[str, list[int]]) -> tuple[int, list[str]]:
        """Removes the recorded files that no longer exist here, except those changed there, which leave the record."""
        removed, kept = 0, []
        for path in [path for path in record if path not in self.files and self._is_gone(path)]:
            where = posixpath.join(self.target, path)
            recorded = record.pop(path)
            with self._explaining_errors(where):
                there = self._lstat(where)
                if there is None:
                    continue
                if [there.st_size, there.st_mtime] != recorded:
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
        """Returns True if a file no longer exists here; an excluded file may still be needed there."""
        return not os.path.lexists(os.path.join(self.source, path))

    def _read_record(self) -> dict[str, list[int]]:
        try:
            with self.sftp.open(posixpath.join(self.target, RECORD)) as file:
                return dict(json.loads(file.read()))
        except (OSError, ValueError, TypeError):
            return {}

    def _write_record(self, record: Mapping[str, list[int]]) -> None:
        where = posixpath.join(self.target, RECORD)
        with self._explaining_errors(where):
            with self.sftp.open(f"{where}{PART}", "w") as file:
                file.write(json.dumps(record))
            self.sftp.posix_rename(f"{where}{PART}", where)

    @contextlib.contextmanager
    def _explaining_errors(self, where: str, size: int = 0) -> Iterator[None]:
        """Replaces the terse errors of SFTP by a `ClusterError` with the cause and the fix."""
        try:
            yield
        except TimeoutError:
            raise
        except PermissionError as error:
            raise ClusterError(
                f"no right to write {where}: create its folder there, owned by the user who logs in, or set another "
                "`username`"
            ) from error
        except OSError as error:
            free = self.free()
            if free is not None and free < size + 4096:
                raise ClusterError(
                    f"no space for {where}: {size} bytes are needed and {free} free; free some there, or `exclude` more"
                ) from error
            raise ClusterError(
                f"{where} cannot be written: {error.strerror or error}; check that no file has the name of a folder "
                "there, and that the user's quota is not exhausted"
            ) from error


@contextlib.contextmanager
def _reading(file: LocalFile) -> Iterator[BinaryIO]:
    """Opens a local file for reading."""
    try:
        content = open(file.path, "rb")  # noqa: SIM115  # the caller's own errors must not be caught here
    except OSError as error:
        fix = "change its permissions, or `exclude` it under `sync`"
        raise ClusterError(f"{file.path} cannot be read here: {error.strerror}; {fix}") from error
    with content:
        yield content
