"""How a command fails: what is wrong on standard error, and an exit status."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rich.console
import typer

from autodist.errors import AutoDistError

BAD_INPUT = 2
"""Exit status where what a command was given cannot be used."""


class UsageError(AutoDistError):
    """A command cannot do with what it was given; its exit status is 2."""


class ScriptFailedError(AutoDistError):
    """The script that a command runs ended badly by itself.

    Args:
        problem: which exception, and where in the script.
    """


def telling_errors(command: Callable[..., None]) -> Callable[..., None]:
    """The command, which tells what AutoDist raises without a traceback, unless its option `traceback` asks for one."""

    @functools.wraps(command)
    def told(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except AutoDistError as error:
            if options.get("traceback"):
                raise
            tell_error(str(error))
            raise typer.Exit(BAD_INPUT) from None

    return told


def require_writable(path: Path) -> None:
    """Passes if a file can be written, before the work whose result goes there; what is there stays as it is.

    Raises:
        UsageError: it cannot.
    """
    is_new = not path.exists()
    if not is_new and not path.is_file():
        return  # a pipe, say, whose reader would take a look for the end
    try:
        with open(path, "ab"):
            pass
        if is_new:
            path.resolve().unlink()  # of a link, what it leads to
    except OSError as error:
        raise _unwritable(path, error) from error


def write_file(path: Path, text: str) -> None:
    """Writes a command's result.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"{path} cannot be written: {error.strerror}.")


def tell_error(problem: str) -> None:
    """Writes what is wrong on standard error."""
    sys.stderr.write(f"autodist: error: {problem}\n")


def output(width: int | None = None) -> rich.console.Console:
    """Where a command's result goes: standard output, as wide as the terminal."""
    # Text is printed as it is: names of variables may hold square brackets.
    return rich.console.Console(width=width, markup=False, highlight=False, soft_wrap=False)
