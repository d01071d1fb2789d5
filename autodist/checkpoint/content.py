"""The content of a checkpoint: values by key, entries of the side file, and extra files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import tensorflow as tf

from autodist.runtime.variables import StoredVariable, TrackedVariable

OURS = "_AUTODIST/"
"""Key prefix of AutoDist's own values; no key of the script's objects starts with it."""

SIDE_FILE = f"{OURS}side_file"
"""Key of a marker for checkpoints that have a side file; it shows that a side file was lost."""


@dataclass(frozen=True)
class Value:
    """A value to be saved under a key.

    Attributes:
        key: its key in the checkpoint.
        read: returns the value.
        stored: the session's variable; None: the value is in this process, and `read` returns it.
    """

    key: str
    read: Callable[[], tf.Tensor]
    stored: StoredVariable | None = None

    @classmethod
    def in_session(cls, key: str, stored: StoredVariable) -> Self:
        """Returns a value that only the session has."""

        def read() -> tf.Tensor:
            raise AssertionError("the value is in the session")

        return cls(key, read, stored)

    @classmethod
    def of_script(cls, key: str, tracked: TrackedVariable) -> Self:
        """Returns the value of a variable of the script: the session's, if that may be newer."""
        return cls(key, tracked.read, tracked.stored if tracked.may_be_behind else None)


@dataclass(frozen=True)
class Content:
    """The content of a checkpoint.

    Attributes:
        values: the values to be written.
        about: the entries of the side file, in addition to those of every run.
        files: extra files, by suffix (".callbacks.npz"), each with the function that writes it to a path.
    """

    values: Iterable[Value] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Callable[[str], None]] = field(default_factory=dict)
