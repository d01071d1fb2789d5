"""Source: which line of which file each value came from, and errors that say so."""

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
    """How a path is written in messages.

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
    """The value as the user wrote it, cut if it is long, or only its kind if it holds others, which may be secret."""
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


@dataclass(frozen=True)
class Source:
    """Where the values of a spec came from.

    Attributes:
        file: path as the user gave it; None if the values came from Python.
        lines: line of each key and list item, counted from 1, by its text (`key_text`).
    """

    file: str | None = None
    lines: Mapping[str, int] = field(default_factory=dict)

    def line(self, path: KeyPath) -> int:
        """Line of `path`, or of the nearest thing around it that is in the file, as for a key that is missing."""
        while path and key_text(path) not in self.lines:
            path = path[:-1]
        return self.lines.get(key_text(path), 1)

    def place(self, path: KeyPath) -> Place | None:
        """Place of `path`; None if the values came from Python."""
        return None if self.file is None else Place(self.file, self.line(path), key_text(path))

    def error(self, path: KeyPath, problem: str) -> ResourceSpecError:
        """The error to raise for what stands at `path`; without a file its text begins with the key."""
        place = self.place(path)
        return (
            ResourceSpecError(problem, place)
            if place or not path
            else ResourceSpecError(f"{key_text(path)}: {problem}")
        )
