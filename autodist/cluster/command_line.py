"""The command line of the Python interpreter, and the user's script behind a debugger, console or similar tool."""

from __future__ import annotations

import enum
import os
import re
import sys
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


# Names of modules and commands. Any other tool, such as a test runner, is started on all workers.
_CONSOLES = {
    *("code", "asyncio", "idlelib", "idlelib.idle", "idle", "IPython", "ipython", "bpython", "ptpython", "ptipython"),
    *("ipykernel", "ipykernel_launcher", "colab_kernel_launcher", "jupyter", "jupyter-run", "xpython", "marimo"),
    *("spyder_kernels.console", "pydevconsole", "streamlit"),
}
_DEBUGGERS = {"pdb", "ipdb", "pudb", "pudb.run", "debugpy", "pydevd"}
_PROFILERS = {
    *("profile", "cProfile", "trace", "coverage", "kernprof", "line_profiler", "memory_profiler", "memray"),
    *("pyinstrument", "scalene", "viztracer"),
}
_OURS = {"autodist.cli.launched"}
_TOOLS = _CONSOLES | _DEBUGGERS | _PROFILERS | _OURS

_NOTEBOOKS = (".ipynb", ".ipy")


@dataclass(frozen=True)
class Main:
    """The `__main__` module of a process.

    Attributes:
        file: its path, which may be relative; None for code entered interactively or passed by -c.
        module: its name if it runs by name ("package.train", "package.__main__"); "__main__" in an archive or a folder
            that runs; None for a file.
        called: `sys.argv[0]`.
    """

    file: str | None
    module: str | None
    called: str

    @staticmethod
    def of_this_process() -> Main:
        main = sys.modules.get("__main__")
        spec = getattr(main, "__spec__", None)
        file = getattr(main, "__file__", None)
        called = sys.argv[0] if getattr(sys, "argv", None) else ""
        return Main(file if isinstance(file, str) else None, getattr(spec, "name", None), called)

    def is_module(self, name: str) -> bool:
        """Returns True if `-m name` runs it."""
        return self.module in (name, f"{name}.__main__")

    def is_file(self, path: str, directory: str) -> bool:
        """Returns True if a path, relative to `directory`, runs it: its file, or the folder or archive of its file."""
        if self.file is None:
            return False
        path, file = os.path.join(directory, path), os.path.join(directory, self.file)
        return is_same(path, os.path.dirname(file) if self.module == "__main__" else file)


def is_same(one: str, other: str) -> bool:
    """Returns True if two paths refer to the same existing file or folder."""
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        return False


def tool_of(command: Command, main: Main, directory: str) -> str | None:
    """Returns the name of the tool that a command starts; None if it starts the user's own code."""
    if command.kind is TargetKind.MODULE:
        name = command.target.removesuffix(".__main__")
        return name if name in _TOOLS else None
    if command.kind is TargetKind.CODE:
        return None
    # bin/coverage-3.11, bin/ipython3, …/site-packages/debugpy, …/pydevd.py
    name = re.sub(r"-?\d+(\.\d+)*\Z", "", os.path.basename(os.path.normpath(command.target)).removesuffix(".py"))
    if name not in _TOOLS:
        return None
    # The user's script may be called trace.py, or the user's folder code; commands of tools have no suffix.
    is_own = command.target.endswith(".py") or main.module == "__main__"
    return None if is_own and main.is_file(command.target, directory) else name


def engine_of(command: Command) -> str | None:
    """Returns the name of the program that runs functions in this process; None if it runs a script.

    >>> engine_of(Command((), TargetKind.CODE, "from multiprocessing.spawn import spawn_main; …", ()))
    'multiprocessing'
    """
    return next((name for kind, text, name in _ENGINES if command.kind is kind and text in command.target), None)


_ENGINES = (
    (TargetKind.CODE, "from multiprocessing.", "multiprocessing"),
    (TargetKind.FILE, "/ray/_private/workers/default_worker.py", "Ray"),
    (TargetKind.MODULE, "pyspark.", "Spark"),
    (TargetKind.MODULE, "distributed.cli.dask_worker", "Dask"),
    (TargetKind.FILE, "/bin/dask", "Dask"),
)
"""Kinds of commands, with a part of what they run, by the program that starts them."""


def is_kernel() -> bool:
    """Returns True if this process is a notebook's kernel."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython is not None and hasattr(get_ipython(), "kernel")


def script_behind(tool: str, command: Command, main: Main, directory: str) -> Command | None:
    """Returns the command of the script that a tool runs; None if it runs none or the script is unknown.

    The script is the one of the tool's arguments that is now `__main__` or, if the tool itself is `__main__`, is
    `sys.argv[0]`.
    """
    is_tool = main.is_module(command.target) or main.is_file(command.target, directory)
    words = list(command.rest)
    if tool.lower() == "ipython" and "--" in words:  # IPython removes the first `--` at any position
        words.remove("--")
    for position, (before, word) in enumerate(zip(["", *words], words, strict=False)):
        kind = TargetKind.MODULE if before in ("-m", "--module") else TargetKind.FILE
        if _runs(kind, word, main, is_tool, directory):
            return Command(command.options, kind, word, tuple(words[position + 1 :]))
    return None


def _runs(kind: TargetKind, word: str, main: Main, is_tool: bool, directory: str) -> bool:
    if kind is TargetKind.MODULE:
        path = os.path.join(os.sep, *word.split("."))
        is_called = word == main.called or main.called.endswith((f"{path}.py", os.path.join(path, "__main__.py")))
        return is_called if is_tool else main.is_module(word)
    if word.endswith(_NOTEBOOKS):
        return False
    if is_tool:
        return is_same(os.path.join(directory, word), os.path.join(directory, main.called))
    return main.is_file(word, directory)
