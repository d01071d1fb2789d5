"""Python's command line, taken apart."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass


class TargetKind(enum.Enum):
    """What Python is told to run; the value is the option that names it."""

    FILE = ""
    MODULE = "-m"
    CODE = "-c"


@dataclass(frozen=True)
class Command:
    """What Python was told.

    >>> command = Command.parse(["python", "-Bium", "package.train", "--steps", "3"])
    >>> command.target, command.arguments
    ('package.train', ('-Bu', '-m', 'package.train', '--steps', '3'))

    Attributes:
        options: of the interpreter; without -i, by which it would wait for somebody who types.
        kind: what `target` is.
        target: path of a script, folder or archive, name of a module, or code.
        rest: arguments of what is run.
    """

    options: tuple[str, ...]
    kind: TargetKind
    target: str
    rest: tuple[str, ...]

    @staticmethod
    def parse(line: Sequence[str]) -> Command | None:
        """What a command line says, the interpreter in front; None if it names nothing that could be run again."""
        options: list[str] = []
        words = list(line[1:])
        while words:
            word = words.pop(0)
            if word == "-":
                return None
            if not word.startswith("-"):
                return Command(tuple(options), TargetKind.FILE, word, tuple(words))
            if word == "--check-hash-based-pycs":
                options += [word, *words[:1]]
                del words[:1]
                continue
            letters, valued, value = _letters(word)
            options += [f"-{letters}"] if letters else []
            if not valued:
                continue
            if not value:
                value = words.pop(0) if words else ""
            if valued in "mc":
                return Command(tuple(options), TargetKind(f"-{valued}"), value, tuple(words)) if value else None
            options += [f"-{valued}", value]
        return None

    @property
    def arguments(self) -> tuple[str, ...]:
        """What any interpreter takes to run the same."""
        named = (self.target,) if self.kind is TargetKind.FILE else (self.kind.value, self.target)
        return (*self.options, *named, *self.rest)


def _letters(word: str) -> tuple[str, str, str]:
    """Of options written together: those without a value, i left out; the one with a value; that value, if it is here.

    >>> _letters("-Bium"), _letters("-Werror"), _letters("-i")
    (('Bu', 'm', ''), ('', 'W', 'error'), ('', '', ''))
    """
    found = re.fullmatch(r"-([^cmWX]*)([cmWX]?)(.*)", word, re.DOTALL)
    assert found, "it begins with -"
    return found[1].replace("i", ""), found[2], found[3]
