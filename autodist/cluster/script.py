"""The script that this process runs, as it has to be started on the other workers."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, replace
from types import FrameType

from autodist.cluster.command_line import Command, TargetKind
from autodist.cluster.environments.launcher_env import OF_ONE_PROCESS
from autodist.cluster.start import ScriptStart, noted_start
from autodist.cluster.tools import Main, is_kernel, is_same, script_behind, tool_of
from autodist.errors import ClusterError

_MEND = (
    "Train in a function, by `autodist.launch(function, workers=2)` (or cluster=…), or put the code into a file and "
    "start it with `python file.py`; or use one worker."
)

# What code that was typed says its file is: at the prompts of Python and pdb, of IPython, IDLE and bpython.
_PROMPT = re.compile(r"<(stdin|console|input|\w+-input-.*|pyshell#\d+)>\Z")

# Where files stand that one process alone has open, as in `python <(cat train.py)`.
_OF_ONE_PROCESS = ("/dev/fd/", "/dev/stdin", "/proc/")


@dataclass(frozen=True)
class Script:
    """What to run on every worker.

    Attributes:
        arguments: of the Python interpreter: its options, the script (or `-m module`), the script's own arguments.
        directory: where it runs.
        file: what has to be there on every machine: the script, or the file of a module that stands below the
            directory; None if there is no such file.
        digest: of that file's content when the script was started here.
        environment: variables that it needs beside those which its machine gives it.
        brought: what it runs that is in no file, a notebook's function say; it finds that as `WorkerClient.brought`.
    """

    arguments: tuple[str, ...]
    directory: str
    file: str | None
    digest: str | None = None
    environment: tuple[tuple[str, str], ...] = ()
    brought: bytes = b""

    @staticmethod
    def of_this_process() -> Script:
        """The script as the user started it here: same options, same arguments, same directory.

        What counts is what Python was told, and the working directory when AutoDist was imported, whatever the script
        has changed since. Of a debugger, a profiler and the like only the script is run that stands behind it.
        Variables whose names begin with `AUTODIST_` go with it, but those that tell a process its own part.

        Raises:
            ClusterError: there is none that others could run as well, as in an interactive session.
        """
        own = tuple((name, value) for name, value in sorted(os.environ.items()) if _goes_with_the_script(name))
        start = noted_start()
        if start.directory is None:
            raise ClusterError(
                "The working directory had been removed when AutoDist was imported, so no worker can be started in "
                "it. Start the script in a directory that is there."
            )
        command = _what_runs(start, start.directory)
        main, file = Main.of_this_process(), None
        if command.kind is TargetKind.FILE:
            target, file = _whole_paths(command.target, main, start.directory)
            command = replace(command, target=target)
        elif command.kind is TargetKind.MODULE:
            file = _file_of_module(command.target, main, start.directory)
        return Script(command.arguments, start.directory, file, start.digest_of(file), own, b"".join(_brought))


_brought: list[bytes] = []


def bring_along(content: bytes) -> None:
    """Lets the other workers have what this process's script runs that is in no file."""
    _brought[:] = [content]


def _goes_with_the_script(variable: str) -> bool:
    return variable.startswith("AUTODIST_") and variable not in OF_ONE_PROCESS


def require_script() -> None:
    """Passes where other workers can run what runs here.

    Raises:
        ClusterError: it was typed, or a tool runs without a script behind it; with the mend.
    """
    Script.of_this_process()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if _PROMPT.match(frame.f_code.co_filename):
            raise ClusterError(
                f"An AutoDist of several workers is made at a prompt, where no other worker can follow. {_MEND}"
            )
        frame = frame.f_back


def _what_runs(start: ScriptStart, directory: str) -> Command:
    """The command that starts the script, without the tool that it was started with."""
    command = Command.parse(sys.orig_argv)
    if command is None:
        raise ClusterError(f"This Python session runs no script which other workers could run as well. {_MEND}")
    if getattr(sys, "frozen", False):
        raise ClusterError(
            "This program was frozen (by PyInstaller, say) and holds no Python that could start other workers. Run it "
            "as a Python script, or use one worker."
        )
    if command.kind is TargetKind.CODE and command.target.startswith("from multiprocessing."):
        raise ClusterError(
            "This process was started by multiprocessing, and other workers have no such parent. Make the AutoDist of "
            "several workers in the process of the script itself, or use one worker."
        )
    if is_kernel():
        raise ClusterError(
            f"A notebook's kernel runs here, and no script that other workers could run as well. {_MEND}"
        )
    now = Main.of_this_process()
    tool = tool_of(command, now, directory)
    if tool is not None:
        # What a tool calls the script is known until that changes `sys.argv`, and from when the tool has come to it.
        found = [script_behind(tool, command, main, directory) for main in (now, start.main)]
        command = next(filter(None, found), None)
        if command is None:
            raise ClusterError(f"{tool} runs here, and no script that other workers could run as well. {_MEND}")
    if command.kind is TargetKind.FILE and command.target.startswith(_OF_ONE_PROCESS):
        raise ClusterError(f"{command.target} is a script that this process alone can read. {_MEND}")
    return command


def _whole_paths(target: str, main: Main, directory: str) -> tuple[str, str]:
    """Of a script, folder or archive, and of the file in it that has to be there."""
    given = os.path.join(directory, target)
    file = os.path.join(directory, main.file or given)
    inner = main.module == "__main__"  # a folder or an archive
    ran = os.path.dirname(file) if inner else file
    # Python itself made a whole path before the script could leave its directory.
    moved = not os.path.exists(given) and os.path.basename(ran) == os.path.basename(os.path.normpath(target))
    if not is_same(given, ran) and not moved:
        return given, given  # a script of the user's that has made another one `__main__`
    return ran, file if inner and os.path.isdir(ran) else ran


def _file_of_module(module: str, main: Main, directory: str) -> str | None:
    """The file of the module that runs, if it stands below the directory; None for one that is installed."""
    if main.file is None or not main.is_module(module):
        return None
    file, below = os.path.join(directory, main.file), os.path.join(directory, "")
    installed = os.path.join(sys.prefix, "")
    return file if file.startswith(below) and not file.startswith(installed) else None
