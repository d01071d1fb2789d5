"""Selects the worker that caused a failure when several fail almost at once, and formats the reason."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from autodist.cluster.stalls import SAME_STEPS
from autodist.errors import WorkerFailedError
from autodist.versions import VERSION

LAST_LINES = 20
"""Number of lines of a worker's output in its error."""

LEAVING = "was sent SIGTERM, which announces that its machine goes away"
"""The reason of the failure of a worker that has received SIGTERM."""

# The errors that TensorFlow raises in a worker because another one is gone.
_ECHO = re.compile(
    r"\b(UnavailableError|CancelledError|AbortedError|UNAVAILABLE:|CANCELLED:|ABORTED:)"
    r"|Connection reset by peer|Socket closed|failed to connect to all addresses"
)

# The last line of the traceback of AutoDist's errors about the script or its arguments.
_OUR_ERROR = re.compile(r"autodist\.errors\.(?!ClusterError|WorkerFailedError|CheckpointError)\w+: ")


@dataclass(frozen=True)
class Ending:
    """The end of one worker before the end of the run.

    Attributes:
        worker: its name.
        reason: reason for a `WorkerFailedError`.
        last_lines: the last lines that it printed.
        is_lost: True if the connection to it was lost, which the end of another worker cannot cause.
    """

    worker: str
    reason: str
    last_lines: tuple[str, ...] = ()
    is_lost: bool = False

    @property
    def is_first_cause(self) -> bool:
        """True if the end of another worker cannot have caused this end."""
        return self.is_lost or self.reason == exit_reason(-signal.SIGKILL, joined=True, done=False)

    @property
    def is_echo(self) -> bool:
        """True if TensorFlow reported the loss of another worker, whose end is then the better cause."""
        return not self.is_first_cause and any(_ECHO.search(line) for line in self.last_lines)

    def error(self) -> WorkerFailedError:
        return WorkerFailedError(self.worker, self.reason, self.last_lines)


def choose_cause(endings: Sequence[Ending]) -> Ending:
    """Returns the ending to report: the first that is not an echo of another worker's end, or else the first.

    Args:
        endings: ends of workers within a few seconds, in the order of their arrival.
    """
    return next((ending for ending in endings if not ending.is_echo), endings[0])


def would_repeat(failure: WorkerFailedError) -> bool:
    """Returns True if the script certainly caused the failure, so that a restart would fail in the same way."""
    if SAME_STEPS in failure.reason or "with exit status 0" in failure.reason or _OUR_ERROR.search(failure.reason):
        return True
    return any(_OUR_ERROR.match(line) for line in failure.last_lines)


def is_of_machines(failure: WorkerFailedError) -> bool:
    """Returns True if the machine caused the failure: it was lost, or announced that it goes away."""
    return failure.reason.startswith("was lost") or failure.reason == LEAVING


def exit_reason(status: int, joined: bool, done: bool) -> str:
    """Returns text about a script's process that ended before the chief's script did.

    Args:
        status: exit status; a negative one is the number of a signal.
        joined: True if the script had used AutoDist.
        done: True if the script had reported that it was done.
    """
    if status < 0:
        return f"was ended by {_signal_name(-status)}"
    if status > 0:
        return f"ended with exit status {status}"
    if not joined:
        return "ended, with exit status 0, without creating an AutoDist: its script took another path than the chief's"
    if not done:
        return "ended, with exit status 0, in the middle of the run (as `os._exit` does)"
    return "did not wait for the other workers at its end"


def why_agent_ended(output: str) -> str:
    """Returns text about an agent that ended without a report: the reason, and the fix if it is known.

    Args:
        output: the output of the agent and of the programs that should have started it.
    """
    if re.search(r"No module named '?autodist\.", output):
        return (
            f"the AutoDist there is another version or another package; install AutoDist {VERSION} "
            "there, or give its SSH group a `python_venv` that has it"
        )
    if re.search(r"No module named '?autodist", output):
        return "autodist is not installed for the Python there; install it, or give its SSH group a `python_venv`"
    if re.search(r"unknown option:? -P", output, re.IGNORECASE):
        return "the Python there is older than 3.11; give its SSH group a `python_venv` with a newer one"
    if re.search(r"python\S*: No such file or directory", output):
        return f"there is no Python at the expected path; give its SSH group a `python_venv` ({output})"
    if not output:
        return (
            "its agent ended without any output: it was killed (`dmesg` there shows whether memory ran out), or the "
            "login there runs another program than the requested one"
        )
    if re.search(r"account is (currently )?not available", output):
        return f"its user may not log in there; give its SSH group a `username` that has a shell ({output})"
    ended = f"its agent ended with the output:\n{output}"
    if "Traceback (most recent call last)" in output:
        return ended
    return (
        f"{ended}\nIf another program has printed this, let the login there run the requested command (no "
        "`ForceCommand`, no restricted shell)"
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
