"""The command that starts this process's script on the other workers."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, replace
from types import FrameType

from autodist.cluster.command_line import (
    Command,
    Main,
    TargetKind,
    engine_of,
    is_kernel,
    is_same,
    script_behind,
    tool_of,
)
from autodist.cluster.environments.launcher_env import OF_ONE_PROCESS
from autodist.cluster.start import ScriptStart, noted_start
from autodist.errors import ClusterError

_FIX = (
    "Train in a function, by `autodist.launch(function, workers=2)` (or cluster=…), or put the code into a file and "
    "start it with `python file.py`; or use one worker."
)

# File names of interactively entered code: at the prompts of Python and pdb, IPython, IDLE and bpython.
_PROMPT = re.compile(r"<(stdin|console|input|\w+-input-.*|pyshell#\d+)>\Z")

# Folders of files that only this process can open, as in `python <(cat train.py)`.
_OF_ONE_PROCESS = ("/dev/fd/", "/dev/stdin", "/proc/")


@dataclass(frozen=True)
class Script:
    """The command to run on every worker.

    Attributes:
        arguments: options of the Python interpreter, the script (or `-m module`), and the script's arguments.
        directory: working directory.
        file: file that every machine must have: the script, or the file of a module below the directory; None if there
            is none.
        digest: digest of that file's content when the script was started here.
        environment: environment variables to add to those of the worker's machine.
        pickled_code: pickled code that is in no file, such as a function of a notebook; workers read it as
            `WorkerClient.pickled_code`.
        function: the function that the workers' processes run instead of a script, for messages; empty: none.
    """

    arguments: tuple[str, ...]
    directory: str
    file: str | None
    digest: str | None = None
    environment: tuple[tuple[str, str], ...] = ()
    pickled_code: bytes = b""
    function: str = ""

    @property
    def name(self) -> str:
        """The script or the function, for messages."""
        return f"the function {self.function}" if self.function else f"the script {self.file}"

    @staticmethod
    def of_this_process() -> Script:
        """Returns the script with the options, arguments and directory of this process.

        Uses the original command line, and the working directory when AutoDist was imported, without the script's later
        changes. For a debugger, a profiler or a similar tool, only the script that it runs is started. Environment
        variables named `AUTODIST_…` are passed on, except those that describe a single process.

        Raises:
            ClusterError: there is no script that other workers could run, as in an interactive session.
        """
        environment = tuple((name, value) for name, value in sorted(os.environ.items()) if _is_passed_on(name))
        start = noted_start()
        if start.directory is None:
            raise ClusterError(
                "The working directory had been removed when AutoDist was imported, so no worker can be started in "
                "it. Start the script in a directory that exists."
            )
        command = _find_command(start, start.directory)
        main, file = Main.of_this_process(), None
        if command.kind is TargetKind.FILE:
            target, file = _absolute_paths(command.target, main, start.directory)
            command = replace(command, target=target)
        elif command.kind is TargetKind.MODULE:
            file = _file_of_module(command.target, main, start.directory)
        digest = start.digest_of(file)
        return Script(command.arguments, start.directory, file, digest, environment, b"".join(_pickled_code))


_pickled_code: list[bytes] = []


def send_with_script(content: bytes) -> None:
    """Sets the pickled code that is sent to the other workers with the script."""
    _pickled_code[:] = [content]


def _is_passed_on(variable: str) -> bool:
    return variable.startswith("AUTODIST_") and variable not in OF_ONE_PROCESS


def require_script() -> None:
    """Checks that other workers can run this process's script.

    Raises:
        ClusterError: the code was entered at a prompt, or a tool runs without a script.
    """
    Script.of_this_process()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if _PROMPT.match(frame.f_code.co_filename):
            raise ClusterError(
                f"An AutoDist of several workers is created at a prompt, where other workers have no script. {_FIX}"
            )
        frame = frame.f_back


def _find_command(start: ScriptStart, directory: str) -> Command:
    """Returns the command that starts the script, without the tool that runs it."""
    command = Command.parse(sys.orig_argv)
    if command is None:
        raise ClusterError(f"This Python session runs no script that other workers could run. {_FIX}")
    if getattr(sys, "frozen", False):
        raise ClusterError(
            "This program was frozen (by PyInstaller, say) and contains no Python that could start other workers. Run "
            "it as a Python script, or use one worker."
        )
    engine = engine_of(command)
    if engine is not None:
        raise ClusterError(
            f"This process was started by {engine} to run functions, and not by a script that other workers could run. "
            "Let the function join the run, `with autodist.join(…) as ad:`, or create the AutoDist of several workers "
            "in the main process of a script, or use one worker."
        )
    if is_kernel():
        raise ClusterError(
            f"This process is a notebook's kernel and runs no script that other workers could run. {_FIX}"
        )
    now = Main.of_this_process()
    tool = tool_of(command, now, directory)
    if tool is not None:
        # The tool's state names the script after the tool has started it, and until the script changes `sys.argv`.
        candidates = [script_behind(tool, command, main, directory) for main in (now, start.main)]
        command = next(filter(None, candidates), None)
        if command is None:
            raise ClusterError(f"{tool} runs here, and no script that other workers could run. {_FIX}")
    if command.kind is TargetKind.FILE and command.target.startswith(_OF_ONE_PROCESS):
        raise ClusterError(f"{command.target} is a script that only this process can read. {_FIX}")
    return command


def _absolute_paths(target: str, main: Main, directory: str) -> tuple[str, str]:
    """Returns the absolute paths of a script, folder or archive, and of its file that every machine must have."""
    named = os.path.join(directory, target)
    file = os.path.join(directory, main.file or named)
    inner = main.module == "__main__"  # a folder or an archive
    ran = os.path.dirname(file) if inner else file
    # Python made the path absolute before the script could change its directory.
    moved = not os.path.exists(named) and os.path.basename(ran) == os.path.basename(os.path.normpath(target))
    if not is_same(named, ran) and not moved:
        return named, named  # the user's script has replaced `__main__` by another script
    return ran, file if inner and os.path.isdir(ran) else ran


def _file_of_module(module: str, main: Main, directory: str) -> str | None:
    """Returns the file of the module that runs if it is below the directory; None if the module is installed."""
    if main.file is None or not main.is_module(module):
        return None
    file, below = os.path.join(directory, main.file), os.path.join(directory, "")
    installed = os.path.join(sys.prefix, "")
    return file if file.startswith(below) and not file.startswith(installed) else None
