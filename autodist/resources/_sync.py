"""The model of `sync`: a folder that is brought to the other machines before a run starts."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import Field, field_validator

from autodist.resources._model import Model

_Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]

SYNC = "a mapping of `folder` and `exclude`, such as {folder: ., exclude: [data, '*.ckpt']}"


class Sync(Model):
    """What every node that is reached over SSH gets, at the same path as here.

    Attributes:
        folder: on the chief's machine; made absolute when it is read.
        exclude: names of files and folders that are left out wherever they stand, or, with a /, their paths below the
            folder; `*`, `?` and `[…]` as in a shell.
    """

    folder: _Line = Field(default=".", description="the path of a folder on the chief's machine")
    exclude: Annotated[tuple[_Line, ...], Field(strict=False)] = Field(
        default=(), description="a list of names or patterns, such as [data, '*.ckpt', logs/old]"
    )

    @field_validator("folder")
    @classmethod
    def _make_absolute(cls, path: str) -> str:
        """The script may have gone elsewhere when it is used."""
        return os.path.abspath(os.path.expanduser(path))
