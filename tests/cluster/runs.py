"""Runs of small scripts under a coordinator, each in a process of its own, with checks for leftovers."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol, Self

from autodist.cluster.timeouts import Stopwatch
from tests.forked_python.start import ON_CPU, forked_python

MARK = "AUTODIST_TEST_RUN"
"""Environment variable of every process of a run, with the run's own value."""

# The function `note` of scripts; a test waits for the notes.
NOTE = '''
def note(what):
    """Writes a file named after the event, which contains the process id."""
    path = os.path.join({notes!r}, what)
    with open(path + "~", "w") as file:
        file.write(str(os.getpid()))
    os.rename(path + "~", path)
'''

# CHIEF contains the chief's code, and WORKER the others' code; both use these names.
_SCRIPT = """
import json, os, signal, subprocess, sys, threading, time
from autodist.cluster.coordinator import Coordinator
from autodist.cluster.environments.start_rendezvous import join_rendezvous
from autodist.cluster.script import Script
from autodist.cluster.script_client import ScriptClient
from autodist.errors import AutoDistError, ClusterError, WorkerFailedError
from autodist.resources import ResourceSpec

directory = os.getcwd()
os.chdir("/")  # the others start in this one's initial directory

{note}
def failed(error):
    note("failed")
    print("FAILED", error.worker, "|", error.reason, "|", list(error.last_lines), flush=True)
    stop.set()

stop = threading.Event()
worker_client = ScriptClient.from_environment()
if worker_client is None:
    spec = ResourceSpec.from_dict(json.loads({spec!r}))
    spec = join_rendezvous(spec, None, lambda: 0) if spec.is_given else spec
    coordinator = Coordinator(spec, failed, Script.of_this_process())
    coordinator.prepare()
    addresses = coordinator.addresses
    coordinator.start(b"payload \\xff")
{chief}
else:
    index = worker_client.index
    note(f"worker{{index}}")
{worker}
"""


class Chief(Protocol):
    """A process, usually the chief's."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def kill(self) -> None: ...


class Run:
    """One run, from `__enter__` to `__exit__`, which ends all processes that are left.

    Args:
        directory: empty, for the script, its output and its notes.
        chief: code that the chief runs after `coordinator.start`.
        worker: code that each other worker runs.
        spec: the cluster; by default three workers on this machine.
        via: converts the command that would start the chief here to the one that does.
        mark: value of `MARK`, if it is already in use.
        is_forked: True if the chief, unless it is started by another command, and workers of this machine are forked
            from a process that has imported AutoDist.

    Attributes:
        environment: environment variables of the chief.
        forked_workers: if the chief is forked from a process that has imported TensorFlow, the number of its workers on
            this machine that are, too; None: it is started as usual.
        forked_so: start of each of these: a key of `becoming.CHAINS`.
    """

    environment: dict[str, str]
    forked_workers: int | None = None
    forked_so = "worker"

    def __init__(
        self,
        directory: Path,
        chief: str,
        worker: str,
        spec: dict[str, Any] | None = None,
        via: Callable[[list[str]], list[str]] = list,
        mark: str | None = None,
        is_forked: bool = True,
    ) -> None:
        self.directory, self.mark = directory, mark or secrets.token_hex(8)
        self._notes = directory / "notes"
        self._notes.mkdir(parents=True)
        spec = spec or {"nodes": [{"address": "localhost", "cpus": [0, 1, 2], "workers": 3}]}
        parts = {"chief": _indent(chief), "worker": _indent(worker)}
        script = directory / "train.py"
        script.write_text(_SCRIPT.format(spec=json.dumps(spec), note=NOTE.format(notes=str(self._notes)), **parts))
        self._command = via([sys.executable, str(script), "argument with spaces", "$HOME", "'"])
        self.forked_workers = workers_here(spec) - 1 if is_forked and via is list else None
        self.environment = os.environ | ON_CPU | {MARK: self.mark}

    def __enter__(self) -> Self:
        with open(self.directory / "stdout", "wb") as out, open(self.directory / "stderr", "wb") as err:
            self.chief = self._start(out, err)
        return self

    def _start(self, out: IO[bytes], err: IO[bytes]) -> Chief:
        return self._start_process(self._command, self.environment, out, err)

    def _start_process(self, command: list[str], environment: dict[str, str], out: IO[bytes], err: IO[bytes]) -> Chief:
        with open(os.devnull, "rb") as nothing:
            if self.forked_workers is not None:
                about = (environment, self.directory, self.forked_workers, self.forked_so)
                forked = forked_python.start(command[1:], (nothing, out, err), *about)
                if forked is not None:
                    return forked
            return subprocess.Popen(
                command,
                stdin=nothing,
                stdout=out,
                stderr=err,
                env=environment,
                cwd=self.directory,
                start_new_session=True,
            )

    def __exit__(self, *about: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.chief.kill()
        self.chief.wait()
        for pid in survivors(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def stdout(self) -> str:
        return (self.directory / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.directory / "stderr").read_text()

    @property
    def failures(self) -> list[str]:
        """The chief's reports of workers that failed: worker, reason and last lines."""
        return [line.removeprefix("FAILED ") for line in self.stdout.splitlines() if line.startswith("FAILED ")]

    def wait_for_note(self, what: str, limit: float = 20) -> int:
        """Waits until the script has written a note, and returns the process id in it."""
        path = self._notes / what
        assert within(limit, path.exists), f"no note {what!r}:\n{self.stdout}\n{self.stderr}"
        return int(path.read_text())

    def has_note(self, what: str) -> bool:
        return (self._notes / what).exists()

    def wait(self, limit: float = 20) -> int:
        """Waits for the chief's exit status."""
        assert within(limit, lambda: self.chief.poll() is not None), (
            f"the chief still runs:\n{self.stdout}\n{self.stderr}"
        )
        return self.chief.wait()

    def assert_gone(self, limit: float = 10) -> None:
        """Checks that nothing of the run is left, on any of its hosts, within `limit` seconds from now."""
        assert all_gone(self.mark, limit), [_describe(pid) for pid in survivors(self.mark)]


def workers_here(spec: dict[str, Any]) -> int:
    """Returns the number of workers that are processes of this machine, including the chief."""
    nodes = spec["nodes"]
    if isinstance(nodes, str):
        return 1  # the scheduler starts them
    mine = [node for node in nodes if "ssh" not in spec or node.get("chief")]
    return sum(int(node.get("workers", 1)) for node in mine)


def survivors(mark: str) -> list[int]:
    """Returns all living processes of a run."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_of(pid, mark)]


def all_gone(mark: str, limit: float = 10) -> bool:
    """Returns True if no process of a run is left within `limit`. Checks the known processes first, then the whole
    machine.
    """
    left: list[int] = []

    def none_left() -> bool:
        left[:] = [pid for pid in left if _is_of(pid, mark)] or survivors(mark)
        return not left

    return within(limit, none_left)


def _is_of(pid: int, mark: str) -> bool:
    with contextlib.suppress(OSError):
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def within(limit: float, condition: Callable[[], object]) -> bool:
    """Returns True if a condition becomes true within `limit`: seconds of a `Stopwatch`, as on an idle machine."""
    stopwatch = Stopwatch()
    while stopwatch.read() < limit:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


def halt(pid: int) -> None:
    """Stops a process; returns once none of its threads runs. On a busy machine, others run on for a while."""
    os.kill(pid, signal.SIGSTOP)
    assert within(10, lambda: all(_state(thread) in "TZX" for thread in Path(f"/proc/{pid}/task").iterdir()))


def _state(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


def parent(pid: int) -> int:
    """Returns the parent of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("PPid:")).split()[1])


def command(pid: int) -> str:
    """Returns the command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def _describe(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"{pid}: {command(pid)}"
    return f"{pid}: gone by now"


def _indent(code: str) -> str:
    return "\n".join("    " + line for line in code.strip().splitlines())
