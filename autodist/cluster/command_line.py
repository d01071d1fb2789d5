"""Parser for the command line of the Python interpreter."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass


class TargetKind(enum.Enum):
    """The kinds of program that Python runs; the value is the option that precedes the program."""

    FILE = ""
    MODULE = "-m"
    CODE = "-c"


@dataclass(frozen=True)
class Command:
    """A parsed command line of Python.

    >>> command = Command.parse(["python", "-Bium", "package.train", "--steps", "3"])
    >>> command.target, command.arguments
    ('package.train', ('-Bu', '-m', 'package.train', '--steps', '3'))

    Attributes:
        options: options of the interpreter, without -i, which would wait for interactive input.
        kind: kind of `target`.
        target: path of a script, folder or archive, name of a module, or code.
        rest: arguments of the program.
    """

    options: tuple[str, ...]
    kind: TargetKind
    target: str
    rest: tuple[str, ...]

    @staticmethod
    def parse(line: Sequence[str]) -> Command | None:
        """Parses a command line that starts with the interpreter; None if it names no program that can be rerun."""
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
            flags, valued, value = _split_options(word)
            options += [f"-{flags}"] if flags else []
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
        """The arguments with which another interpreter runs the same program."""
        named = (self.target,) if self.kind is TargetKind.FILE else (self.kind.value, self.target)
        return (*self.options, *named, *self.rest)


def _split_options(word: str) -> tuple[str, str, str]:
    """Splits combined options into those without a value (except -i), the one with a value, and its value if present.

    >>> _split_options("-Bium"), _split_options("-Werror"), _split_options("-i")
    (('Bu', 'm', ''), ('', 'W', 'error'), ('', '', ''))
    """
    match = re.fullmatch(r"-([^cmWX]*)([cmWX]?)(.*)", word, re.DOTALL)
    assert match, "it begins with -"
    return match[1].replace("i", ""), match[2], match[3]
