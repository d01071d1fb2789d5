"""Checksums: by which a checkpoint's files are known to be what was written.

CRC-32 is computed several times faster than a disk gives bytes on every processor, which SHA-256 is on few; and what it
is against is damage. Of values TensorFlow has another one in its index, which it compares when it reads them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from autodist.checkpoint.threads import in_threads

READERS = 4
"""Files that are read at the same time: more than cores, since they wait for the disk."""

_CHUNK = 4 << 20
_OWN = "crc32"


def checksums(paths: Iterable[str], readers: int = READERS) -> dict[str, str]:
    """CRC-32 of files, as eight hexadecimal digits.

    Raises:
        OSError: one cannot be read.
    """
    listed = list(paths)
    return dict(zip(listed, in_threads(checksum, listed, readers), strict=True))


def checksum(path: str) -> str:
    """CRC-32 of a file, as eight hexadecimal digits.

    Raises:
        OSError: it cannot be read.
    """
    found, chunk = 0, memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as opened:
        while length := opened.readinto(chunk):
            found = zlib.crc32(chunk[:length], found)
    return f"{found:08x}"


def sealed(content: Mapping[str, Any]) -> str:
    """JSON of a mapping, in which stands its own checksum too."""
    plain = json.loads(json.dumps(content))  # names as they are read: as text
    return json.dumps({**plain, _OWN: _checksum_of(plain)}, indent=1, sort_keys=True)


def unsealed(text: str) -> dict[str, Any]:
    """What was `sealed`.

    Raises:
        ValueError: it is not what was written.
    """
    content = json.loads(text)
    if not isinstance(content, dict) or content.pop(_OWN, None) != _checksum_of(content):
        raise ValueError("it is not what was written: it has another checksum than it says")
    return content


def _checksum_of(plain: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(plain, sort_keys=True).encode()):08x}"
