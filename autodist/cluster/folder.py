"""The files of a folder that are brought to other machines."""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autodist.errors import ClusterError

RECORD = ".autodist-sync.json"
"""On a machine, in the folder: what was brought there."""

PART = ".autodist-part-"
"""In the name of a file that is on its way."""

MOST_FILES = 20_000
"""More than code has."""

_NEVER = (".git", ".hg", ".svn", "__pycache__", "*.pyc", RECORD, f"*{PART}*")


@dataclass(frozen=True)
class LocalFile:
    """A file here.

    Attributes:
        path: of it.
        size: in bytes.
        modified: in whole seconds since 1970, as SFTP tells it.
        mode: its permissions.
    """

    path: str
    size: int
    modified: int
    mode: int


def find_files(folder: str, exclude: Sequence[str]) -> dict[str, LocalFile]:
    """What is to be brought, by path below the folder.

    Left out are besides what version control and Python keep for themselves (`.git`, `__pycache__`), virtual
    environments, and what is no file, a link to a folder among them.

    Args:
        folder: absolute path.
        exclude: patterns, as `Sync` has them.

    Raises:
        ClusterError: the folder is not there, or holds more files than code has.
    """
    if not os.path.isdir(folder):
        raise ClusterError(f"sync: the folder {folder} is not there, or is none; correct `folder`.")
    found = {}
    for path in _walk(folder, "", [pattern.rstrip("/") for pattern in exclude]):
        about = os.stat(os.path.join(folder, path))
        if stat.S_ISREG(about.st_mode):
            whole = os.path.join(folder, path)
            found[path] = LocalFile(whole, about.st_size, int(about.st_mtime), stat.S_IMODE(about.st_mode) & 0o777)
        if len(found) > MOST_FILES:
            raise ClusterError(
                f"sync: {folder} holds more than {MOST_FILES} files; name what no run needs (data, results) under "
                "`exclude`, or a smaller `folder`."
            )
    return found


def _walk(folder: str, below: str, exclude: Sequence[str]) -> Iterator[str]:
    """Paths of files, and of links to some."""
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
    """Whether a path is left out, of which no folder is.

    >>> [is_excluded(path, ["data", "logs/old", "*.ckpt"]) for path in ("a/data", "logs/old", "a/logs/old", "b.ckpt")]
    [True, True, False, True]
    """
    name = os.path.basename(path)
    return any(
        fnmatch.fnmatchcase(path if "/" in pattern else name, pattern.removeprefix("./"))
        for pattern in (*_NEVER, *exclude)
    )
