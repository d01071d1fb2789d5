"""known_hosts files, read as OpenSSH reads them: patterns, hashed names, revoked keys, and bad lines skipped."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_REVOKED = "@revoked"


@dataclass(frozen=True)
class KnownKeys:
    """What known_hosts files say of one server.

    Attributes:
        kinds: the type of each key, by the key's bytes.
        revoked: keys that are not to be trusted.
        bad_lines: "file:line" of each line that cannot be read.
    """

    kinds: dict[bytes, str]
    revoked: frozenset[bytes] = frozenset()
    bad_lines: tuple[str, ...] = ()


def find_known_keys(files: Sequence[str], names: Sequence[str]) -> KnownKeys:
    """The keys of a server, under the first of its names that has any.

    Args:
        files: paths; one that is not there or cannot be read holds nothing.
        names: of the server, as the files spell them ("[host]:2222", "host").
    """
    entries, bad = [], []
    for file in files:
        for number, line in enumerate(_lines(file), 1):
            content = line.strip()
            if content and not content.startswith("#"):
                entry = _parse(content)
                bad += [f"{file}:{number}"] if entry is None else []
                entries += [entry] if entry is not None else []
    revoked = frozenset(e.key for e in entries if e.marker == _REVOKED and any(_names(e.hosts, n) for n in names))
    kinds: dict[bytes, str] = {}
    for name in names:
        kinds = kinds or {e.key: e.kind for e in entries if not e.marker and _names(e.hosts, name)}
    return KnownKeys(kinds, revoked, tuple(bad))


@dataclass(frozen=True)
class _Entry:
    marker: str
    hosts: str
    kind: str
    key: bytes


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text(errors="replace").split("\n")
    except OSError:
        return []


def _parse(line: str) -> _Entry | None:
    """`[@marker] hosts type key [comment]`; None where it is not that."""
    fields = line.split()
    marker = fields.pop(0) if fields[0].startswith("@") else ""
    if len(fields) < 3:
        return None
    hosts, kind, text = fields[:3]
    try:
        key = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    name = kind.encode()
    return _Entry(marker, hosts, kind, key) if key.startswith(len(name).to_bytes(4, "big") + name) else None


def _names(hosts: str, name: str) -> bool:
    """Whether an entry's first field, a list of patterns or one hashed name, means a server."""
    name = name.lower()
    if hosts.startswith("|1|"):
        return _is_hash_of(hosts, name)
    found = False
    for pattern in hosts.lower().split(","):
        if _fits(pattern.removeprefix("!"), name):
            if pattern.startswith("!"):
                return False
            found = True
    return found


def _is_hash_of(hosts: str, name: str) -> bool:
    try:
        salt, hashed = (base64.b64decode(part, validate=True) for part in hosts.split("|")[2:])
    except (binascii.Error, ValueError):  # ValueError: there are not two parts
        return False
    return hmac.compare_digest(hmac.digest(salt, name.encode(), hashlib.sha1), hashed)


def _fits(pattern: str, name: str) -> bool:
    expression = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(expression, name) is not None
