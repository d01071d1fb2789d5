"""Reader for known_hosts files, with OpenSSH's rules: patterns, hashed names and revoked keys; skips bad lines."""

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
    """The entries of known_hosts files for one server.

    Attributes:
        kinds: the type of each key, by the key's bytes.
        revoked: keys that must not be trusted.
        bad_lines: "file:line" of each line that cannot be parsed.
    """

    kinds: dict[bytes, str]
    revoked: frozenset[bytes] = frozenset()
    bad_lines: tuple[str, ...] = ()


def find_known_keys(files: Sequence[str], names: Sequence[str]) -> KnownKeys:
    """Returns the keys of a server, under the first of its names that has any.

    Args:
        files: paths; a file that cannot be read counts as empty.
        names: names of the server, as spelled in the files ("[host]:2222", "host").
    """
    entries, bad = [], []
    for file in files:
        for number, line in enumerate(_lines(file), 1):
            content = line.strip()
            if content and not content.startswith("#"):
                entry = _parse(content)
                bad += [f"{file}:{number}"] if entry is None else []
                entries += [entry] if entry is not None else []
    revoked = frozenset(e.key for e in entries if e.marker == _REVOKED and any(_matches(e.hosts, n) for n in names))
    kinds: dict[bytes, str] = {}
    for name in names:
        kinds = kinds or {e.key: e.kind for e in entries if not e.marker and _matches(e.hosts, name)}
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
    """Parses `[@marker] hosts type key [comment]`; returns None for any other line."""
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


def _matches(hosts: str, name: str) -> bool:
    """Returns True if an entry's first field, a list of patterns or one hashed name, matches a server's name."""
    name = name.lower()
    if hosts.startswith("|1|"):
        return _is_hash_of(hosts, name)
    is_match = False
    for pattern in hosts.lower().split(","):
        if _matches_pattern(pattern.removeprefix("!"), name):
            if pattern.startswith("!"):
                return False
            is_match = True
    return is_match


def _is_hash_of(hosts: str, name: str) -> bool:
    try:
        salt, hashed = (base64.b64decode(part, validate=True) for part in hosts.split("|")[2:])
    except (binascii.Error, ValueError):  # ValueError: there are not two parts
        return False
    return hmac.compare_digest(hmac.digest(salt, name.encode(), hashlib.sha1), hashed)


def _matches_pattern(pattern: str, name: str) -> bool:
    expression = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(expression, name) is not None
