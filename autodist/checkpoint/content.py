"""What makes a checkpoint: values by key, what the side file says, files beside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import tensorflow as tf

from autodist.runtime.variables import Kept

OURS = "_AUTODIST/"
"""What the keys of values begin with that are beside those of the script's objects, of which none has any."""

SIDE_FILE = f"{OURS}side_file"
"""What a checkpoint has that belongs to a side file, by which one that has lost it is known."""


@dataclass(frozen=True)
class Value:
    """What is saved under a key.

    Attributes:
        key: in the checkpoint.
        read: gives the value.
        kept: how the session keeps it; None: this process has it, and `read` gives it.
    """

    key: str
    read: Callable[[], tf.Tensor]
    kept: Kept | None = None

    @classmethod
    def in_session(cls, key: str, kept: Kept) -> Self:
        """A value that the session has, and this process does not."""

        def read() -> tf.Tensor:
            raise AssertionError("the session has it")

        return cls(key, read, kept)


@dataclass(frozen=True)
class Content:
    """What makes a checkpoint.

    Attributes:
        values: to be written.
        about: for the side file, besides what it says of every run.
        files: written beside, by suffix (".callbacks.npz") and by what writes one to a path.
    """

    values: Iterable[Value] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Callable[[str], None]] = field(default_factory=dict)
