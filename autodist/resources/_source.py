"""Source: the file and line of each value of a spec, and errors that name them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autodist.errors import Place, ResourceSpecError
from autodist.resources._limits import LONGEST_SHOWN

KeyPath = tuple[str | int, ...]

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")


def key_text(path: KeyPath) -> str:
    """Formats a path for messages.

    >>> key_text(("nodes", 1, "port"))
    'nodes[1].port'
    >>> key_text(("strategy", "variables", "embedding/.*"))
    'strategy.variables["embedding/.*"]'
    """
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif _PLAIN_KEY.match(step):
            text += f".{step}" if text else step
        else:
            text += f'["{step}"]'
    return text


def as_yaml(value: Any) -> str:
    """Formats a value as YAML, shortened; for a list or mapping, which may hold secrets, returns only its kind."""
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


@dataclass(frozen=True)
class Source:
    """The origin of the values of a spec.

    Attributes:
        file: path as the user wrote it; None if the values came from Python.
        lines: line of each key and list item, counted from 1, by its text (`key_text`).
    """

    file: str | None = None
    lines: Mapping[str, int] = field(default_factory=dict)

    def line(self, path: KeyPath) -> int:
        """Returns the line of `path`; for a missing key, that of the closest enclosing one in the file."""
        while path and key_text(path) not in self.lines:
            path = path[:-1]
        return self.lines.get(key_text(path), 1)

    def place(self, path: KeyPath) -> Place | None:
        """Returns the position of `path`; None if the values came from Python."""
        return None if self.file is None else Place(self.file, self.line(path), key_text(path))

    def error(self, path: KeyPath, problem: str) -> ResourceSpecError:
        """Returns the error for the value at `path`; without a file its text starts with the key."""
        place = self.place(path)
        return (
            ResourceSpecError(problem, place)
            if place or not path
            else ResourceSpecError(f"{key_text(path)}: {problem}")
        )
