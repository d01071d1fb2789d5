"""Debuggers, profilers, consoles and the like that run a user's script: which script that is."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass

from autodist.cluster.command_line import Command, TargetKind

# Names of modules and commands. One that is not here is started again with the script, as a test runner has to be.
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
    """What runs as `__main__`.

    Attributes:
        file: its path, which may be relative; None of what is typed or given by -c.
        module: its name, where it was found by one ("package.train", "package.__main__"); "__main__" in an archive or
            a folder that is run; None of a file.
        called: what the script finds as `sys.argv[0]`.
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
        """Whether `-m name` runs it."""
        return self.module in (name, f"{name}.__main__")

    def is_file(self, path: str, directory: str) -> bool:
        """Whether a path that is given in `directory` runs it: the file, or the folder or archive that holds it."""
        if self.file is None:
            return False
        path, file = os.path.join(directory, path), os.path.join(directory, self.file)
        return is_same(path, os.path.dirname(file) if self.module == "__main__" else file)


def is_same(one: str, other: str) -> bool:
    """Whether two paths lead to one file or folder, which is there."""
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        return False


def tool_of(command: Command, main: Main, directory: str) -> str | None:
    """The tool that a command starts; None if what it starts is the user's own."""
    if command.kind is TargetKind.MODULE:
        name = command.target.removesuffix(".__main__")
        return name if name in _TOOLS else None
    if command.kind is TargetKind.CODE:
        return None
    # bin/coverage-3.11, bin/ipython3, …/site-packages/debugpy, …/pydevd.py
    name = re.sub(r"-?\d+(\.\d+)*\Z", "", os.path.basename(os.path.normpath(command.target)).removesuffix(".py"))
    if name not in _TOOLS:
        return None
    # A script called trace.py, a folder called code: tools' commands have no suffix, and their folders give way.
    is_own = command.target.endswith(".py") or main.module == "__main__"
    return None if is_own and main.is_file(command.target, directory) else name


def is_kernel() -> bool:
    """Whether a notebook's kernel runs here, whichever command has started it."""
    ask = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return ask is not None and hasattr(ask(), "kernel")


def script_behind(tool: str, command: Command, main: Main, directory: str) -> Command | None:
    """What a tool was told to run; None if that is nothing, or not known.

    It is what has become `__main__` by now or, under a tool that stays `__main__` itself, what is called so; and it
    stands among the tool's arguments.
    """
    is_tool = main.is_module(command.target) or main.is_file(command.target, directory)
    words = list(command.rest)
    if tool.lower() == "ipython" and "--" in words:  # it takes out the first, wherever that stands
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
