"""The end of a run that starts again: the failure by which it was lost, or the machines that join it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autodist.cluster.failure import is_of_machines
from autodist.errors import AutoDistError, ClusterError, WorkerFailedError


@dataclass(frozen=True)
class Joining:
    """Machines that can join a run.

    Attributes:
        addresses: their addresses; in an elastic run, the numbers of the processes.
        reason: the reason why they join now, as a clause of a sentence.
        left_out: addresses of the nodes that the next start leaves out.
        workers: number of workers before and after.
    """

    addresses: tuple[str, ...]
    reason: str
    left_out: tuple[str, ...]
    workers: tuple[int, int]


@dataclass(frozen=True)
class LostRun:
    """The failure by which a run was lost.

    In an elastic run, the numbers of processes stand in place of the addresses of nodes.

    Attributes:
        error: the error as raised in the script.
        step: the training step in progress; None: none was made.
        saved: step of the last checkpoint; None: none was saved.
        away: addresses of nodes, if the run could not start without them and nothing else was wrong.
        leaving: addresses of nodes other than the chief's that have received SIGTERM.
        chief_leaves: True if this process has received SIGTERM.
        saved_as: path of the last checkpoint.
        failed: addresses of nodes other than the chief's on which a worker failed.
        missing: addresses of nodes that the run did not have, which the next start leaves out, too.
        refused: for each address, the reported reason why a node cannot be used.
        joining: machines with which the run starts again; None: it was lost.
    """

    error: AutoDistError
    step: int | None
    saved: int | None
    away: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    chief_leaves: bool = False
    saved_as: str | None = None
    failed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    joining: Joining | None = None

    @property
    def is_of_script(self) -> bool:
        """True if the chief's script raised the error."""
        return not isinstance(self.error, ClusterError)

    @property
    def fault(self) -> str:
        """The error as a clause of a sentence."""
        error = self.error
        if isinstance(error, WorkerFailedError):
            return f"{error.worker} {error.reason}".rstrip(".")
        text = str(error).rstrip(".")
        return text[:1].lower() + text[1:]

    @property
    def is_of_machines(self) -> bool:
        """True if a machine caused the failure: it was lost, goes away or could not be reached."""
        return bool(self.away or self.leaving) or not (
            isinstance(self.error, WorkerFailedError) and not is_of_machines(self.error)
        )

    @property
    def place(self) -> str:
        return "before the first step" if self.step is None else f"in step {self.step}"
