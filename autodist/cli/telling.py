"""How a command fails: what is wrong on standard error, and an exit status."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rich.console
import typer

from autodist.errors import BAD_INPUT, AutoDistError


class UsageError(AutoDistError):
    """A command cannot do with what it was given; its exit status is 2."""


class ScriptFailedError(AutoDistError):
    """The script that a command runs ended badly by itself.

    Args:
        problem: which exception, and where in the script.
    """


def telling_errors(command: Callable[..., None]) -> Callable[..., None]:
    """The command, which tells what AutoDist and the system raise without a traceback, unless it is asked for one."""

    @functools.wraps(command)
    def told(*args: Any, **options: Any) -> None:
        try:
            try:
                command(*args, **options)
            finally:
                _flush()
        except (AutoDistError, OSError) as error:
            # A reader that wants no more, such as `head`, is nothing to tell of; what runs the command knows of it.
            if options.get("traceback") or isinstance(error, BrokenPipeError):
                raise
            tell_error(str(error))
            raise typer.Exit(BAD_INPUT) from None

    return told


def _flush() -> None:
    """Passes on what was written, now that it can still be told if it does not arrive."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # Python tries again at the end
        raise


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
    with contextlib.suppress(OSError):  # nobody is told
        typer.echo(f"autodist: error: {problem}", err=True)


def output() -> rich.console.Console:
    """Where a command's result goes: standard output, as wide as the terminal."""
    # Text is printed as it is: names of variables may hold square brackets.
    return rich.console.Console(markup=False, highlight=False, soft_wrap=False)
