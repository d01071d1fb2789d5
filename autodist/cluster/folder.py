"""The files of a folder that are copied to other machines."""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autodist.errors import ClusterError

RECORD = ".autodist-sync.json"
"""Name of the file in a machine's folder that records the files copied to it."""

PART = ".autodist-part-"
"""Part of the name of a file that is still being copied."""

MAX_FILES = 20_000
"""Limit on the number of files; more than any source code has."""

_NEVER = (".git", ".hg", ".svn", "__pycache__", "*.pyc", RECORD, f"*{PART}*")


@dataclass(frozen=True)
class LocalFile:
    """A file on this machine.

    Attributes:
        path: absolute path.
        size: size in bytes.
        modified: time of the last change, in whole seconds since 1970 as in SFTP.
        mode: permission bits.
    """

    path: str
    size: int
    modified: int
    mode: int


def find_files(folder: str, exclude: Sequence[str]) -> dict[str, LocalFile]:
    """Returns the files to copy, by path below the folder.

    Skips the files of version control, Python's caches (`.git`, `__pycache__`) and virtual environments. Also skips
    everything that is not a file, such as links to folders.

    Args:
        folder: absolute path.
        exclude: patterns, as in `Sync`.

    Raises:
        ClusterError: the folder does not exist, or holds more than `MAX_FILES` files.
    """
    if not os.path.isdir(folder):
        raise ClusterError(f"sync: {folder} does not exist, or is not a folder; correct `folder`.")
    files = {}
    for path in _walk(folder, "", [pattern.rstrip("/") for pattern in exclude]):
        about = os.stat(os.path.join(folder, path))
        if stat.S_ISREG(about.st_mode):
            full_path = os.path.join(folder, path)
            files[path] = LocalFile(full_path, about.st_size, int(about.st_mtime), stat.S_IMODE(about.st_mode) & 0o777)
        if len(files) > MAX_FILES:
            raise ClusterError(
                f"sync: {folder} holds more than {MAX_FILES} files; list paths that no run needs (data, results) "
                "under `exclude`, or choose a smaller `folder`."
            )
    return files


def _walk(folder: str, below: str, exclude: Sequence[str]) -> Iterator[str]:
    """Yields the paths of files and of links to files."""
    with os.scandir(os.path.join(folder, below)) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        path = os.path.join(below, entry.name)
        if is_excluded(path, exclude):
            continue
        if entry.is_dir(follow_symlinks=False):
            if not os.path.exists(os.path.join(entry.path, "pyvenv.cfg")):
                yield from _walk(folder, path, exclude)
        elif entry.is_file():
            yield path


def is_excluded(path: str, exclude: Sequence[str]) -> bool:
    """Returns True if a pattern excludes the path; does not check the folders above it.

    >>> [is_excluded(path, ["data", "logs/old", "*.ckpt"]) for path in ("a/data", "logs/old", "a/logs/old", "b.ckpt")]
    [True, True, False, True]
    """
    name = os.path.basename(path)
    return any(
        fnmatch.fnmatchcase(path if "/" in pattern else name, pattern.removeprefix("./"))
        for pattern in (*_NEVER, *exclude)
    )
