"""Every error that AutoDist raises on purpose; each message names the thing, the reason and the mend."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

BAD_INPUT = 2
"""Exit status of a command where what it was given cannot be used."""


class AutoDistError(Exception):
    """Base of all errors that AutoDist raises on purpose."""


@dataclass(frozen=True)
class Place:
    """Where in a YAML file something stands."""

    file: str
    line: int
    key: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.key}"


class ResourceSpecError(AutoDistError, ValueError):
    """The YAML that describes the machines cannot be used.

    Args:
        problem: what is wrong, with what is allowed.
        place: where it stands, if it came from a file.
    """

    def __init__(self, problem: str, place: Place | None = None) -> None:
        self.problem, self.place = problem, place
        super().__init__(f"{place}: {problem}" if place else problem)


class StrategyError(AutoDistError, ValueError):
    """A strategy asks for what cannot be done.

    Args:
        problem: the variable, the reason and the mend.
        place: where it stands, if it came from a file.
    """

    def __init__(self, problem: str, place: Place | None = None) -> None:
        self.problem, self.place = problem, place
        super().__init__(f"{place}: {problem}" if place else problem)


class MisusedError(AutoDistError):
    """A script cannot be run by the command that runs it; the command's exit status is 2."""


class TraceError(AutoDistError):
    """A trace that was asked for cannot be written."""


class LaunchError(AutoDistError):
    """A function cannot be launched, or what it returned cannot be brought back."""


class CaptureError(AutoDistError):
    """The training step cannot be captured as it is written."""


class CaptureMismatchError(CaptureError):
    """A worker captured another graph than the chief did."""


class RewriteError(AutoDistError):
    """A kernel cannot rewrite the graph without changing what is trained."""


class SplitControlFlowError(RewriteError):
    """A loop or a branch of TensorFlow 1 is partly in a part of a step: no value passes there.

    Args:
        node: in it.
        part: the key of its part; None: it is in none.
        reader: what reads it, in another part.
        reader_part: the key of that.
    """

    def __init__(self, node: str, part: Hashable, reader: str, reader_part: Hashable) -> None:
        self.node, self.reader = node, reader
        first, second = ("no part" if key is None else f"part {key!r}" for key in (part, reader_part))
        super().__init__(
            f"{node!r} is in {first} and {reader!r}, which reads it, in {second}: a loop or a branch of TensorFlow 1 "
            "cannot be split. Give all its nodes one key."
        )


class PartsError(RewriteError):
    """A step cannot be split as a callback says: parts of it need each other, or one itself.

    Args:
        keys: of the parts; each gives something to the next one, and the last to the first.
        ways: for each of them the nodes by which it does: from its own, by way of nodes of no part, to the next one's.

    Attributes:
        node: the one that goes back to the first part.
    """

    def __init__(self, keys: tuple[Hashable, ...], ways: tuple[tuple[str, ...], ...]) -> None:
        self.keys, self.ways, self.node = keys, ways, ways[-1][-1]
        told = ", ".join(
            f"{key!r} gives to {after!r} ({' → '.join(way)})"
            for key, after, way in zip(keys, (*keys[1:], keys[0]), ways, strict=True)
        )
        super().__init__(
            f"The node {self.node!r} goes back to the part {keys[0]!r}, so that no part is first: {told}. "
            f"Give {self.node!r} another key, or one key to all that lies between."
        )


class UnevenBatchError(AutoDistError, ValueError):
    """A batch cannot be split over the replicas without changing what is trained.

    Attributes:
        has_run: whether a part of the step had run when it was found out.
    """

    has_run = False


class EmptyBatchError(UnevenBatchError):
    """A batch has no examples on any worker; raised on all that take part in the step."""


class NotSharedError(AutoDistError):
    """An evaluation cannot be shared among the replicas; each worker computes the whole. Never seen by a script."""


class FetchedElsewhereError(StrategyError):
    """What a session's run fetches beside training is at other workers, which send it where all fetch the same."""


class ReductionError(AutoDistError, ValueError):
    """Values cannot be reduced over the workers as asked; raised on all workers alike."""


class CheckpointError(AutoDistError):
    """A checkpoint cannot be written or read; what was there before is as it was."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint is not of the objects that are to be restored; none of them was changed.

    Args:
        path: of the checkpoint.
        missing: what the objects have and the checkpoint has not.
        left_over: what the checkpoint has and the objects have not.
        others: what differs in shape or dtype, with both.
    """

    def __init__(
        self, path: str, missing: tuple[str, ...], left_over: tuple[str, ...], others: tuple[str, ...]
    ) -> None:
        self.path, self.missing, self.left_over, self.others = path, missing, left_over, others
        lists = {"not in the checkpoint": missing, "left over in it": left_over, "of another shape or dtype": others}
        told = "".join(f"\n  {title}: {', '.join(names)}" for title, names in lists.items() if names)
        super().__init__(
            f"The checkpoint {path} is not of these objects, and nothing was restored:{told}\nGive the objects that "
            "were saved, under the same names, and build a model or an optimizer that makes its variables later."
        )


class ClusterError(AutoDistError):
    """The machines cannot be reached or cannot run the script."""


class MachinesAwayError(ClusterError):
    """Machines do not answer, and nothing else is wrong; one that refuses a login has answered.

    Args:
        problem: what keeps each of them away.
        workers: names of those that were to run there.
    """

    def __init__(self, problem: str, workers: tuple[str, ...]) -> None:
        self.workers = workers
        super().__init__(problem)


class WorkerFailedError(ClusterError):
    """A worker ended badly and the rest was stopped.

    Args:
        worker: its name, as in the output.
        reason: exit status, signal or loss of connection.
        last_lines: the last lines that it printed.

    Attributes:
        headline: the message without these lines.
    """

    def __init__(self, worker: str, reason: str, last_lines: tuple[str, ...] = ()) -> None:
        self.worker, self.reason, self.last_lines = worker, reason, last_lines
        self.headline = f"{worker} {reason}{' T' if reason.endswith('.') else '; t'}he other workers were stopped."
        tail = "".join(f"\n    {line}" for line in last_lines)
        super().__init__(f"{self.headline} Its last lines:{tail}" if tail else self.headline)


class UnsupportedVersionError(AutoDistError, ImportError):
    """Python or a package that AutoDist stands on is missing or has a version that cannot work.

    Args:
        package: what it is.
        found: its version; None if it is not installed.
        needed: the versions that work.
        mend: the command that installs one.
    """

    def __init__(self, package: str, found: str | None, needed: str, mend: str) -> None:
        self.package, self.found, self.needed, self.mend = package, found, needed, mend
        state = "is not installed" if found is None else f"{found} is installed"
        super().__init__(f"{package} {state}; AutoDist needs {package} {needed}. Mend: {mend}")
