"""Which worker's end is the first cause, when several end badly within moments."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from autodist.cluster.stalls import SAME_STEPS
from autodist.errors import WorkerFailedError
from autodist.versions import VERSION

LAST_LINES = 20
"""How many lines of a worker's output its error shows."""

LEAVING = "was sent SIGTERM, by which a machine says that it goes away"
"""Why a worker is given up that has said so."""

# What TensorFlow raises in a worker because another one has gone.
_ECHO = re.compile(
    r"\b(UnavailableError|CancelledError|AbortedError|UNAVAILABLE:|CANCELLED:|ABORTED:)"
    r"|Connection reset by peer|Socket closed|failed to connect to all addresses"
)

# What Python shows last of an error of ours that says what is wrong with the script, or what it was given.
_OUR_ERROR = re.compile(r"autodist\.errors\.(?!ClusterError|WorkerFailedError|CheckpointError)\w+: ")


@dataclass(frozen=True)
class Ending:
    """How one worker's part in the run ended.

    Attributes:
        worker: its name.
        reason: as in `WorkerFailedError`.
        last_lines: that it printed.
        is_lost: whether the connection to it was lost, which no other worker's end can cause.
    """

    worker: str
    reason: str
    last_lines: tuple[str, ...] = ()
    is_lost: bool = False

    @property
    def is_echo(self) -> bool:
        """Whether its last lines say that TensorFlow lost another worker: then that one's end is the better cause."""
        return not self.is_lost and any(_ECHO.search(line) for line in self.last_lines)

    def error(self) -> WorkerFailedError:
        return WorkerFailedError(self.worker, self.reason, self.last_lines)


def choose_cause(endings: Sequence[Ending]) -> Ending:
    """The ending to report, of those that came in within moments, in the order in which they came in.

    It is the first that does not look like the echo of another worker's end, or else the first.
    """
    return next((ending for ending in endings if not ending.is_echo), endings[0])


def would_repeat(failure: WorkerFailedError) -> bool:
    """Whether a worker's end is certainly the script's doing, so that it would end so each time."""
    if SAME_STEPS in failure.reason or "with exit status 0" in failure.reason or _OUR_ERROR.search(failure.reason):
        return True
    return any(_OUR_ERROR.match(line) for line in failure.last_lines)


def is_of_machines(failure: WorkerFailedError) -> bool:
    """Whether a worker's machine could not be heard any more, or said that it goes away: no doing of a script."""
    return failure.reason.startswith("was lost") or failure.reason == LEAVING


def exit_reason(status: int, joined: bool, done: bool) -> str:
    """In words, how a script's process ended before the chief's script did.

    Args:
        status: exit status; a negative one is the number of a signal.
        joined: whether the script had used AutoDist by then.
        done: whether it had reported that it was done.
    """
    if status < 0:
        return f"was ended by {_signal_name(-status)}"
    if status > 0:
        return f"ended with exit status {status}"
    if not joined:
        return (
            "ended, with exit status 0, without having made an AutoDist: its script took another path than the chief's"
        )
    if not done:
        return "ended, with exit status 0, in the middle of the run (as `os._exit` does)"
    return "did not wait for the other workers at its end"


def why_agent_ended(said: str) -> str:
    """In words, why an agent ended that has reported nothing, with the mend where it is known.

    Args:
        said: what it and the programs that were to start it printed.
    """
    if re.search(r"No module named '?autodist\.", said):
        return (
            f"the AutoDist there is of another version or another package; install AutoDist {VERSION} "
            "there, or give its SSH group a `python_venv` that has it"
        )
    if re.search(r"No module named '?autodist", said):
        return "autodist is not installed for the Python there; install it, or give its SSH group a `python_venv`"
    if re.search(r"unknown option:? -P", said, re.IGNORECASE):
        return "the Python there is older than 3.11; give its SSH group a `python_venv` with a newer one"
    if re.search(r"python\S*: No such file or directory", said):
        return f"there is no Python where it is looked for; give its SSH group a `python_venv` ({said})"
    if not said:
        return (
            "its agent ended without a word: it was killed (`dmesg` there tells whether for its memory), or the login "
            "there runs something else than what it was asked to"
        )
    if re.search(r"account is (currently )?not available", said):
        return f"its user may not log in there; give its SSH group a `username` that has a shell ({said})"
    return f"its agent ended, saying:\n{said}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
