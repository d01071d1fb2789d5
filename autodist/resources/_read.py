"""Reads a text file named by a user, and refuses other kinds of files."""

from __future__ import annotations

from autodist.errors import ResourceSpecError
from autodist.resources._limits import LONGEST_FILE
from autodist.resources._source import Source


def read_text(file: str) -> str:
    """Returns the content of a file, without a byte order mark.

    Raises:
        ResourceSpecError: the file cannot be read, is longer than a spec can be, or is not UTF-8.
    """
    try:
        with open(file, "rb") as opened:
            content = opened.read(LONGEST_FILE + 1)  # limited: the file may be a checkpoint, or /dev/zero
    except OSError as error:
        raise ResourceSpecError(f"{file}: cannot be read: {error.strerror}; pass the path of a YAML file") from error
    except ValueError as error:  # NUL in the name, or half of a surrogate pair
        raise ResourceSpecError(f"{file!r}: not a valid file name; pass the path of a YAML file") from error
    if len(content) > LONGEST_FILE:
        limit = f"{LONGEST_FILE >> 20} MiB"
        raise ResourceSpecError(f"{file}: longer than {limit}, the limit for a spec; pass the path of a YAML file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        where = Source(file, {"encoding": line})
        raise where.error(("encoding",), "not UTF-8 text; save the file in UTF-8") from error
