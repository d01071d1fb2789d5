"""Folder: the checkpoints of a run on disk. The last complete checkpoint survives a crash at any time.

A checkpoint `ckpt-3` is TensorFlow's `ckpt-3.index` and `ckpt-3.data-…`, plus `ckpt-3.json` for state that TensorFlow's
format does not hold. It exists from the moment that its index has its name, which is the last step. As in TensorFlow,
the file `checkpoint` names the latest one.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from autodist.checkpoint.files import READERS, checksums, number_of, sealed, sync
from autodist.checkpoint.lock import FolderLock
from autodist.errors import CheckpointError

FORMAT = 1
"""Version of the side file. Keys may be added under the same number; a reader ignores unknown keys."""

_NAME = "ckpt"
_STATE = "checkpoint"
_UNFINISHED = ".ckpt-"
_NUMBERED = re.compile(rf"{_NAME}-(\d+)\.index")
_PART_OF = re.compile(rf"({_NAME}-\d+)\.(?:data-\d+-of-\d+|json|[a-z]+\.(?:npz|json))(?:\.new)?")


class Folder:
    """The folder into which one run writes checkpoints.

    Args:
        path: the path of the folder, on the chief's machine; created with the first checkpoint.

    Raises:
        CheckpointError: it is not on a file system of the machine.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if "://" in os.fspath(path):
            raise CheckpointError(
                f"{os.fspath(path)} is not on a file system of this machine, and AutoDist relies on atomic renames. "
                "Pass a folder, and copy the checkpoints from there."
            )
        self.path = os.path.abspath(os.path.expanduser(path))

    def prefix(self, number: int) -> str:
        """Returns the prefix of a checkpoint's files."""
        return os.path.join(self.path, f"{_NAME}-{number}")

    def numbers(self) -> list[int]:
        """Returns the numbers of all checkpoints in the folder, in order.

        Raises:
            CheckpointError: the folder cannot be listed.
        """
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:  # created with the first checkpoint
            names = []
        except OSError as error:
            raise CheckpointError(
                f"the checkpoints in {self.path} cannot be listed: {error}. Name another folder, or make this "
                "one readable."
            ) from error
        return sorted(int(found[1]) for found in map(_NUMBERED.fullmatch, names) if found)

    def latest(self) -> str | None:
        """Returns the prefix of the last checkpoint, including TensorFlow's own; None: there is none.

        Raises:
            CheckpointError: the folder cannot be listed.
        """
        named = None
        with suppress(ValueError):  # the file `checkpoint` names none: it is empty, as after a crash of the machine
            named = tf.train.latest_checkpoint(self.path)
        if named is not None:
            return str(named)
        numbers = self.numbers()
        return self.prefix(numbers[-1]) if numbers else None

    def claim(self) -> None:
        """Claims the folder for this process, for its lifetime.

        Raises:
            CheckpointError: another process has claimed it, which is named, or it cannot be written.
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
        """Yields a temporary folder for a new checkpoint; removes incomplete checkpoints of earlier runs.

        If the block raises, as on a full disk, nothing of its own checkpoint stays either, unless it is complete.

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
        except BaseException:
            with suppress(OSError):  # the folder was removed, or is no longer writable
                self._clean()
            raise
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
        """Flushes a checkpoint to the disk and then gives it its name; returns its prefix.

        Args:
            made: the prefix of its files.
            number: its number, unused in the folder.
            about: the entries of the side file, which also holds the files' checksums.
            readers: the number of files read at the same time for checksums.
            finished: the checksums of files that are already flushed, from `ChecksummedWrites`.
        """
        prefix = self.prefix(number)
        files = {path.removeprefix(made): path for path in sorted(glob.glob(glob.escape(made) + ".*"))}
        known = {path: finished[number_of(path)] for path in files.values() if number_of(path) in finished}
        rest = [path for path in files.values() if path not in known]
        for path in rest:
            sync(path)
        found = {**known, **checksums(rest, readers)}
        entries = {suffix: {"bytes": os.path.getsize(path), "crc32": found[path]} for suffix, path in files.items()}
        _write(f"{prefix}.json", sealed({"format": FORMAT, **about, "files": entries}))
        index = files.pop(".index")
        for suffix, path in files.items():
            os.replace(path, prefix + suffix)
        sync(self.path)
        os.replace(index, f"{prefix}.index")
        sync(self.path)
        return prefix

    def keep(self, most: int) -> None:
        """Names the last checkpoint in the file `checkpoint`, and removes all but the last `most`."""
        kept = [self.prefix(number) for number in self.numbers()][-most:]
        names = [os.path.basename(prefix) for prefix in kept]  # relative, so that the folder can be moved
        state = tf.compat.v1.train.generate_checkpoint_state_proto(self.path, names[-1], names)
        _write(os.path.join(self.path, _STATE), str(state))
        sync(self.path)
        for prefix in map(self.prefix, self.numbers()):
            if prefix not in kept:
                os.unlink(f"{prefix}.index")  # first: without it the checkpoint does not exist
        self._clean()

    def _clean(self) -> None:
        """Removes the files of incomplete checkpoints, left by a run that was killed while it wrote or removed one."""
        there = {self.prefix(number) for number in self.numbers()}
        for name in os.listdir(self.path):
            path = os.path.join(self.path, name)
            part = _PART_OF.fullmatch(name)
            if name.startswith(_UNFINISHED):
                shutil.rmtree(path, ignore_errors=True)
            elif part and os.path.join(self.path, part[1]) not in there:
                os.unlink(path)


def digest(path: str) -> str:
    """Returns the SHA-256 of a file."""
    with open(path, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _write(path: str, text: str) -> None:
    """Replaces a file; the text is on the disk before the file gets its name."""
    new = path + ".new"
    try:
        with open(new, "w") as opened:
            opened.write(text)
        sync(new)
        os.replace(new, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(new)
        raise
