"""Error output of the commands: a message on standard error, and the exit status."""

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
from autodist.logs.terminal import print_message


class UsageError(AutoDistError):
    """Error raised when a command cannot use its arguments; the exit status is 2."""


class ScriptFailedError(AutoDistError):
    """Error raised when the script that a command runs failed on its own.

    Args:
        problem: the exception, and its position in the script.
    """


def report_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Wraps a command: prints errors of AutoDist and of the system without a traceback, unless `--traceback` is set."""

    @functools.wraps(command)
    def wrapped(*args: Any, **options: Any) -> None:
        try:
            try:
                command(*args, **options)
            finally:
                _flush()
        except (AutoDistError, OSError) as error:
            # A closed pipe (`| head`) is not an error to report; Typer handles it.
            if options.get("traceback") or isinstance(error, BrokenPipeError):
                raise
            print_message(f"error: {error}")
            raise typer.Exit(BAD_INPUT) from None

    return wrapped


def _flush() -> None:
    """Flushes standard output, so that a failure to write can still be reported."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # Python tries again at the end
        raise


def require_writable(path: Path) -> None:
    """Checks that a file can be written, before the work that produces its content; an existing file is not changed.

    Raises:
        UsageError: it cannot be written.
    """
    is_new = not path.exists()
    if not is_new and not path.is_file():
        return  # for example a pipe, whose reader would take the closed file for the end
    try:
        with open(path, "ab"):
            pass
        if is_new:
            path.resolve().unlink()  # for a link, its target
    except OSError as error:
        raise _unwritable(path, error) from error


def write_file(path: Path, text: str) -> None:
    """Writes a command's result to a file.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"{path} cannot be written: {error.strerror}.")


def output() -> rich.console.Console:
    """Returns the console for a command's result: standard output, as wide as the terminal."""
    # Text is printed unchanged: names of variables may contain square brackets.
    return rich.console.Console(markup=False, highlight=False, soft_wrap=False)
