"""Runs a script in this process, as `python script.py` would."""

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

from autodist.cli.telling import ScriptFailedError, UsageError
from autodist.errors import AutoDistError


@dataclass(frozen=True)
class Target:
    """What a command was told to run.

    Attributes:
        name: path of a script, or name of a module.
        is_module: which of the two.
        arguments: of the script.
    """

    name: str
    is_module: bool
    arguments: Sequence[str]

    def require(self) -> None:
        """Passes if it is there.

        Raises:
            UsageError: it is not, or is no Python.
        """
        if self.is_module:
            self._require_module()
        elif os.path.isdir(self.name):
            if not os.path.isfile(os.path.join(self.name, "__main__.py")):
                raise UsageError(f"{self.name} is a folder without a __main__.py; give a script.")
        elif not os.path.isfile(self.name):
            if os.path.exists(self.name):
                raise UsageError(f"{self.name} is no file, which each worker could read; save the script in one.")
            raise UsageError(f"the script {self.name} is not there; give the path of a Python script.")
        else:
            self._require_python()

    def command(self) -> list[str]:
        """The command line of Python that runs it."""
        named = ["-m", self.name] if self.is_module else [self.name]
        return [sys.executable, *named, *self.arguments]

    def run_here(self) -> None:
        """Runs it in this process, and returns when it has ended, or has called `sys.exit` with 0.

        Raises:
            ScriptFailedError: it raised what AutoDist does not, or ended with another status.
            AutoDistError: AutoDist's own.
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
        """What Python gives a script: its arguments, and its folder (or, for a module, this one) to import from."""
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
        except (ImportError, ValueError) as error:  # of a package around it; or no name of a module
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
            return  # an archive, which Python runs as well
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python tells them where the script runs
                compile(content, self.name, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise UsageError(f"{self.name} is no Python script: {error}.") from error


def describe(error: BaseException, script: str) -> str:
    """An exception in words, with the line of the script, or else of the file, that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [frame for frame in frames if os.path.basename(frame.filename) == os.path.basename(script)]
    at = (mine or frames)[-1:] if frames else []
    where = "".join(f" ({frame.filename}:{frame.lineno})" for frame in at)
    return f"{type(error).__name__}: {error}{where}"
