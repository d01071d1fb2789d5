"""Checksums that detect damage of a checkpoint's files.

On every processor CRC-32 is several times faster than a disk; SHA-256 is so on only a few. The purpose is to detect
damage. TensorFlow's index has another checksum of each value, which it compares when it reads the value.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from autodist.checkpoint.threads import in_threads

READERS = 4
"""Number of files read at the same time: more than cores, since the readers wait for the disk."""

_CHUNK = 4 << 20
_OWN = "crc32"


def checksums(paths: Iterable[str], readers: int = READERS) -> dict[str, str]:
    """Computes the CRC-32 of files, as eight hexadecimal digits.

    Raises:
        OSError: a file cannot be read.
    """
    listed = list(paths)
    return dict(zip(listed, in_threads(checksum, listed, readers), strict=True))


def checksum(path: str) -> str:
    """Computes the CRC-32 of a file, as eight hexadecimal digits.

    Raises:
        OSError: the file cannot be read.
    """
    found, chunk = 0, memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as opened:
        while length := opened.readinto(chunk):
            found = zlib.crc32(chunk[:length], found)
    return f"{found:08x}"


def sealed(content: Mapping[str, Any]) -> str:
    """Returns JSON of a mapping, with its own checksum."""
    plain = json.loads(json.dumps(content))  # with keys as text, as they will be read
    return json.dumps({**plain, _OWN: _checksum_of(plain)}, indent=1, sort_keys=True)


def unsealed(text: str) -> dict[str, Any]:
    """Returns the mapping in a text made by `sealed`.

    Raises:
        ValueError: the text was altered.
    """
    content = json.loads(text)
    if not isinstance(content, dict) or content.pop(_OWN, None) != _checksum_of(content):
        raise ValueError("it is not what was written: its checksum does not match")
    return content


def _checksum_of(plain: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(plain, sort_keys=True).encode()):08x}"
