"""Folder: the checkpoints of a run on disk, of which the last whole one is there whatever happens.

A checkpoint `ckpt-3` is TensorFlow's `ckpt-3.index` and `ckpt-3.data-…`, and beside them `ckpt-3.json`, in which stands
what TensorFlow has no place for. It is there from when its index has its name, which is the last that is done. The
file `checkpoint` names the latest, as TensorFlow's own.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from autodist.checkpoint.checksums import READERS, checksums, sealed
from autodist.checkpoint.lock import FolderLock
from autodist.errors import CheckpointError

FORMAT = 1
"""Of the side file. Keys may be added to it under the same number; a reader passes over what it does not know."""

_NAME = "ckpt"
_STATE = "checkpoint"
_UNFINISHED = ".ckpt-"
_NUMBERED = re.compile(rf"{_NAME}-(\d+)\.index")
_PART_OF = re.compile(rf"({_NAME}-\d+)\.(?:data-\d+-of-\d+|json|[a-z]+\.(?:npz|json))(?:\.new)?")


class Folder:
    """Where checkpoints of one run are written.

    Args:
        path: of the folder, on the chief's machine; made when the first one is written.

    Raises:
        CheckpointError: it is on no file system of the machine.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if "://" in os.fspath(path):
            raise CheckpointError(
                f"{os.fspath(path)} is on no file system of this machine, where a name given to a file is there for "
                "good. Give a folder, and copy the checkpoints from there."
            )
        self.path = os.path.abspath(os.path.expanduser(path))

    def prefix(self, number: int) -> str:
        """Of a checkpoint's files."""
        return os.path.join(self.path, f"{_NAME}-{number}")

    def numbers(self) -> list[int]:
        """Of all checkpoints that are there, in order.

        Raises:
            CheckpointError: it cannot be seen which are there.
        """
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:  # it is made with the first one
            names = []
        except OSError as error:
            raise CheckpointError(
                f"it cannot be seen which checkpoints are in {self.path}: {error}. Name another folder, or make this "
                "one readable."
            ) from error
        return sorted(int(found[1]) for found in map(_NUMBERED.fullmatch, names) if found)

    def latest(self) -> str | None:
        """Prefix of the last checkpoint, TensorFlow's own included; None: there is none.

        Raises:
            CheckpointError: it cannot be seen which are there.
        """
        named = tf.train.latest_checkpoint(self.path)
        if named is not None:
            return str(named)
        numbers = self.numbers()
        return self.prefix(numbers[-1]) if numbers else None

    def claim(self) -> None:
        """Makes the folder this process's, for as long as it lives.

        Raises:
            CheckpointError: another one has it, which is named, or it cannot be written.
        """
        try:
            os.makedirs(self.path, exist_ok=True)
            FolderLock.take(self.path)
        except OSError as error:
            raise self._not_writable(error) from error

    def _not_writable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"no checkpoint can be written in {self.path}: {error}. Name another folder, or make this one writable."
        )

    @contextmanager
    def unfinished(self) -> Iterator[str]:
        """A folder in which a checkpoint is made; what earlier runs have left half done goes.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        try:
            os.makedirs(self.path, exist_ok=True)
            self._clean()
            made = tempfile.mkdtemp(prefix=_UNFINISHED, dir=self.path)
        except OSError as error:
            raise self._not_writable(error) from error
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def publish(
        self,
        made: str,
        number: int,
        about: Mapping[str, Any],
        readers: int = READERS,
        finished: Mapping[int, str] = MappingProxyType({}),
    ) -> str:
        """Gives a checkpoint its name once it is on the disk; returns its prefix.

        Args:
            made: prefix of its files.
            number: that no other checkpoint of the folder has.
            about: goes into the side file, beside the files' checksums.
            readers: how many files are read at the same time for these.
            finished: checksums of files that are on the disk already, as `ChecksummedWrites` gives them.
        """
        prefix = self.prefix(number)
        files = {path.removeprefix(made): path for path in sorted(glob.glob(glob.escape(made) + ".*"))}
        known = {path: finished[number_of(path)] for path in files.values() if number_of(path) in finished}
        rest = [path for path in files.values() if path not in known]
        for path in rest:
            sync(path)
        found = {**known, **checksums(rest, readers)}
        told = {suffix: {"bytes": os.path.getsize(path), "crc32": found[path]} for suffix, path in files.items()}
        _write(f"{prefix}.json", sealed({"format": FORMAT, **about, "files": told}))
        index = files.pop(".index")
        for suffix, path in files.items():
            os.replace(path, prefix + suffix)
        sync(self.path)
        os.replace(index, f"{prefix}.index")
        sync(self.path)
        return prefix

    def keep(self, most: int) -> None:
        """Names the last checkpoint in the file `checkpoint`, and removes all but the last so many."""
        kept = [self.prefix(number) for number in self.numbers()][-most:]
        names = [os.path.basename(prefix) for prefix in kept]  # without the folder, so that it may be moved
        state = tf.compat.v1.train.generate_checkpoint_state_proto(self.path, names[-1], names)
        _write(os.path.join(self.path, _STATE), str(state))
        sync(self.path)
        for prefix in map(self.prefix, self.numbers()):
            if prefix not in kept:
                os.unlink(f"{prefix}.index")  # first: from then on it is none
        self._clean()

    def _clean(self) -> None:
        """Removes what belongs to no checkpoint: one that was being written, or removed, when its run was killed."""
        there = {self.prefix(number) for number in self.numbers()}
        for name in os.listdir(self.path):
            path = os.path.join(self.path, name)
            part = _PART_OF.fullmatch(name)
            if name.startswith(_UNFINISHED):
                shutil.rmtree(path, ignore_errors=True)
            elif part and os.path.join(self.path, part[1]) not in there:
                os.unlink(path)


def digest(path: str) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _write(path: str, text: str) -> None:
    """Replaces a file by one with this text, which is on the disk when it gets the name."""
    new = path + ".new"
    with open(new, "w") as opened:
        opened.write(text)
    sync(new)
    os.replace(new, path)


def sync(path: str) -> None:
    """Returns once a file, or a folder's list of files, is on the disk (`fsync`)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def number_of(path: str) -> int:
    """A file's inode, by which its file system knows it, whatever it is called."""
    return os.stat(path).st_ino
