"""Runs a script in this process, like `python script.py`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import runpy
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autodist.cli.command_errors import ScriptFailedError, UsageError
from autodist.errors import AutoDistError


@dataclass(frozen=True)
class Target:
    """The script or module that a command runs.

    Attributes:
        name: path of a script, or name of a module.
        is_module: True for a module.
        arguments: the arguments of the script.
    """

    name: str
    is_module: bool
    arguments: Sequence[str]

    def require(self) -> None:
        """Checks that the script or module exists.

        Raises:
            UsageError: it does not exist, or is not Python.
        """
        if self.is_module:
            self._require_module()
        elif os.path.isdir(self.name):
            if not os.path.isfile(os.path.join(self.name, "__main__.py")):
                raise UsageError(f"{self.name} is a folder without a __main__.py; pass a script.")
        elif not os.path.isfile(self.name):
            if os.path.exists(self.name):
                raise UsageError(f"{self.name} is not a file that each worker could read; save the script in a file.")
            raise UsageError(f"the script {self.name} does not exist; pass the path of a Python script.")
        else:
            self._require_python()

    @property
    def words(self) -> list[str]:
        """The arguments with which Python runs it."""
        return [*(["-m"] if self.is_module else []), self.name, *self.arguments]

    def run_here(self) -> None:
        """Runs it in this process; returns when it has ended or called `sys.exit` with 0.

        Raises:
            ScriptFailedError: it raised an exception that is not AutoDist's, or ended with another status.
            AutoDistError: AutoDist's own error.
        """
        with self.as_main():
            try:
                if self.is_module:
                    runpy.run_module(self.name, run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(self.name, run_name="__main__")
            except AutoDistError:
                raise
            except SystemExit as error:
                if error.code not in (None, 0):
                    raise ScriptFailedError(
                        f"the script ended by sys.exit({error.code!r}) before a training step of an AutoDist."
                    ) from error
            except Exception as error:
                raise ScriptFailedError(f"the script failed: {describe(error, self.name)}") from error

    @contextlib.contextmanager
    def as_main(self) -> Iterator[None]:
        """Sets `sys.argv` and `sys.path` as Python does for a script (for a module, the current folder)."""
        before, path = sys.argv, list(sys.path)
        folder = os.getcwd() if self.is_module else os.path.dirname(os.path.abspath(self.name))
        sys.argv = [self.name, *self.arguments]
        sys.path.insert(0, folder)
        try:
            yield
        finally:
            sys.argv = before
            sys.path[:] = path

    def _require_module(self) -> None:
        sys.path.insert(0, os.getcwd())
        try:
            found = importlib.util.find_spec(self.name)
        except (ImportError, ValueError) as error:  # of a parent package; or not the name of a module
            raise UsageError(f"the module {self.name} cannot be found: {error}.") from error
        finally:
            sys.path.remove(os.getcwd())
        if found is None:
            raise UsageError(f"there is no module {self.name} below {os.getcwd()}, and none is installed.")

    def _require_python(self) -> None:
        try:
            with open(self.name, "rb") as file:
                content = file.read()
        except OSError as error:
            raise UsageError(f"the script {self.name} cannot be read: {error.strerror}.") from error
        if content.startswith(b"PK\x03\x04"):
            return  # an archive, which Python can run
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python shows them when the script runs
                compile(content, self.name, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise UsageError(f"{self.name} is not a Python script: {error}.") from error


def describe(error: BaseException, script: str) -> str:
    """Describes an exception, with the line of the script, or else of another file, that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if os.path.basename(frame.filename) == os.path.basename(script)]
    at = (own or frames)[-1:] if frames else []
    where = "".join(f" ({frame.filename}:{frame.lineno})" for frame in at)
    return f"{type(error).__name__}: {error}{where}"
