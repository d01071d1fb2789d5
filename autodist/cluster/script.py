"""The script that this process runs, as it has to be started on the other workers."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from autodist.errors import ClusterError


@dataclass(frozen=True)
class Script:
    """What to run on every worker.

    Attributes:
        arguments: of the Python interpreter: its options, the script (or `-m module`), the script's own arguments.
        directory: where it runs.
        file: the script, None if it is not given as a file.
        environment: variables that it needs beside those which its machine gives it.
    """

    arguments: tuple[str, ...]
    directory: str
    file: str | None
    environment: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of_this_process() -> Script:
        """The script as the user started it here: same options, same arguments, same directory.

        Variables whose names begin with `AUTODIST_` go with it.

        Raises:
            ClusterError: the process runs no script, as an interactive session does.
        """
        own = tuple((name, value) for name, value in sorted(os.environ.items()) if name.startswith("AUTODIST_"))
        directory = os.getcwd()
        position = script_position(sys.orig_argv)
        if position is None:
            raise ClusterError(
                "This Python session runs no script which other workers could run as well. "
                "Put the code into a file and start it with `python file.py`, or use one worker."
            )
        arguments = list(sys.orig_argv[1:])
        if sys.orig_argv[position].startswith("-"):
            return Script(tuple(arguments), directory, None, own)
        file = os.path.abspath(getattr(sys.modules["__main__"], "__file__", None) or sys.orig_argv[position])
        arguments[position - 1] = file
        return Script(tuple(arguments), directory, file, own)


def script_position(command: Sequence[str]) -> int | None:
    """Where in a Python command line the script stands, or the option `-m` or `-c` in its place; None if nowhere.

    >>> script_position(["python", "-X", "dev", "-u", "train.py", "-m"])
    4
    >>> script_position(["python", "-um", "package.train"])
    1
    """
    position = 1
    while position < len(command):
        argument = command[position]
        if argument == "-":
            return None
        if not argument.startswith("-") or _names_code(argument):
            return position
        position += 2 if _takes_next(argument) else 1
    return None


def _names_code(option: str) -> bool:
    """Whether an option, or the last of several one-letter ones written together, is `-m` or `-c`."""
    return not option.startswith("--") and re.match(r"-[^cmWX]*[cm]", option) is not None


def _takes_next(option: str) -> bool:
    """Whether the next argument is the value of an option, as that of `-W` in `-W error`, not in `-Werror`."""
    return option == "--check-hash-based-pycs" or re.fullmatch(r"-[^-WX]*[WX]", option) is not None
