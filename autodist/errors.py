"""All errors that AutoDist raises deliberately. Each message names the thing, the reason and the fix."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

BAD_INPUT = 2
"""Exit status of a command whose input cannot be used."""


class AutoDistError(Exception):
    """Base class of all errors that AutoDist raises deliberately.

    They can be pickled, as Ray, Dask and `multiprocessing` do to raise them in another process.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # Python would call the class with the text alone, but some constructors have other arguments.
        return _unpickle, (type(self), self.args), self.__dict__


def _unpickle(kind: type[AutoDistError], args: tuple[Any, ...]) -> AutoDistError:
    error = kind.__new__(kind)
    error.args = args
    return error


@dataclass(frozen=True)
class Place:
    """Position of a key in a YAML file."""

    file: str
    line: int
    key: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.key}"


class ResourceSpecError(AutoDistError, ValueError):
    """Error in the YAML file that describes the machines.

    Args:
        problem: the fault and the allowed values.
        place: its position, if the value came from a file.
    """

    def __init__(self, problem: str, place: Place | None = None) -> None:
        self.problem, self.place = problem, place
        super().__init__(f"{place}: {problem}" if place else problem)


class StrategyError(AutoDistError, ValueError):
    """Error raised when a strategy is not possible.

    Args:
        problem: the variable, the reason and the fix.
        place: its position, if the value came from a file.
    """

    def __init__(self, problem: str, place: Place | None = None) -> None:
        self.problem, self.place = problem, place
        super().__init__(f"{place}: {problem}" if place else problem)


class MisusedError(AutoDistError):
    """Error raised when a command cannot run the script; the command's exit status is 2."""


class TraceError(AutoDistError):
    """Error raised when a requested trace cannot be written."""


class LaunchError(AutoDistError):
    """Error raised when a function cannot be launched or its result cannot be returned to the caller."""


class CaptureError(AutoDistError):
    """Error raised when the training step cannot be captured as written."""


class CaptureMismatchError(CaptureError):
    """Error raised when a worker captured a graph that differs from the chief's."""


class RewriteError(AutoDistError):
    """Error raised when a kernel cannot rewrite the graph without changing the training result."""


class SplitControlFlowError(RewriteError):
    """Error raised when a TensorFlow 1 loop or conditional is only partly inside a part of a step.

    Args:
        node: a node of the loop or conditional.
        part: the key of its part; None: no part.
        reader: the node that reads it, in another part.
        reader_part: the key of the reader's part.
    """

    def __init__(self, node: str, part: Hashable, reader: str, reader_part: Hashable) -> None:
        self.node, self.reader = node, reader
        first, second = ("no part" if key is None else f"part {key!r}" for key in (part, reader_part))
        super().__init__(
            f"{node!r} is in {first} and {reader!r}, which reads it, in {second}: a loop or a branch of TensorFlow 1 "
            "cannot be split. Use one key for all its nodes."
        )


class PartsError(RewriteError):
    """Error raised when a callback's keys split a step into parts that depend on each other in a cycle.

    Args:
        keys: the parts in the order of the cycle; each part feeds the next, and the last feeds the first.
        ways: for each part, the path of nodes to the next part: its last node, nodes of no part, the next part's first.

    Attributes:
        node: the node at which the cycle returns to the first part.
    """

    def __init__(self, keys: tuple[Hashable, ...], ways: tuple[tuple[str, ...], ...]) -> None:
        self.keys, self.ways, self.node = keys, ways, ways[-1][-1]
        cycle = ", ".join(
            f"{key!r} feeds {after!r} ({' → '.join(way)})"
            for key, after, way in zip(keys, (*keys[1:], keys[0]), ways, strict=True)
        )
        super().__init__(
            f"The node {self.node!r} leads back to the part {keys[0]!r}, so that no part can run first: {cycle}. "
            f"Use another key for {self.node!r}, or one key for all nodes of the cycle."
        )


class UnevenBatchError(AutoDistError, ValueError):
    """Error raised when a batch cannot be split over the replicas without changing the training result.

    Attributes:
        has_run: True if a part of the step had already run.
    """

    has_run = False


class EmptyBatchError(UnevenBatchError):
    """Error raised on all workers of a step when the batch has no examples on any worker."""


class NotSharedError(AutoDistError):
    """Internal error: an evaluation cannot be split over the replicas, so each worker computes all of it."""


class FetchedElsewhereError(StrategyError):
    """Error raised when a worker alone fetches values of other workers; they send them only if all fetch the same."""


class ReductionError(AutoDistError, ValueError):
    """Error raised when values cannot be reduced over the workers, or exchanged between them."""


class CheckpointError(AutoDistError):
    """Error raised when a checkpoint cannot be written or read; existing files and variables are unchanged."""


class CheckpointMismatchError(CheckpointError):
    """Error raised when a checkpoint does not match the objects to be restored; none of them has changed.

    Args:
        path: of the checkpoint.
        missing: names that the objects have and the checkpoint lacks.
        left_over: names that the checkpoint has and the objects lack.
        others: names whose shape or dtype differs, with both values.
    """

    def __init__(
        self, path: str, missing: tuple[str, ...], left_over: tuple[str, ...], others: tuple[str, ...]
    ) -> None:
        self.path, self.missing, self.left_over, self.others = path, missing, left_over, others
        lists = {
            "not in the checkpoint": missing,
            "only in the checkpoint": left_over,
            "of another shape or dtype": others,
        }
        listed = "".join(f"\n  {title}: {', '.join(names)}" for title, names in lists.items() if names)
        super().__init__(
            f"The checkpoint {path} does not match these objects, and nothing was restored:{listed}\nPass the objects "
            "that were saved, under the same names, and build models and optimizers before you restore them."
        )


class ClusterError(AutoDistError):
    """Error raised when machines cannot be reached or cannot run the script."""


class MachinesAwayError(ClusterError):
    """Error raised when the only fault is that machines do not answer; a refused login counts as an answer.

    Args:
        problem: the reason for each machine.
        workers: names of the workers placed on these machines.
    """

    def __init__(self, problem: str, workers: tuple[str, ...]) -> None:
        self.workers = workers
        super().__init__(problem)


class WorkerFailedError(ClusterError):
    """Error raised after a worker failed and the other workers were stopped.

    Args:
        worker: its name, as in the output.
        reason: exit status, signal or loss of connection.
        last_lines: the last lines that it printed.

    Attributes:
        headline: the message without `last_lines`.
    """

    def __init__(self, worker: str, reason: str, last_lines: tuple[str, ...] = ()) -> None:
        self.worker, self.reason, self.last_lines = worker, reason, last_lines
        self.headline = f"{worker} {reason}{' T' if reason.endswith('.') else '; t'}he other workers were stopped."
        tail = "".join(f"\n    {line}" for line in last_lines)
        super().__init__(f"{self.headline} Its last lines:{tail}" if tail else self.headline)


class UnsupportedVersionError(AutoDistError, ImportError):
    """Error raised when Python or a required package is missing or has an unsupported version.

    Args:
        package: name of the package, or "Python".
        found: its version; None if it is not installed.
        needed: the supported versions.
        mend: the command that installs a supported version.
    """

    def __init__(self, package: str, found: str | None, needed: str, mend: str) -> None:
        self.package, self.found, self.needed, self.mend = package, found, needed, mend
        state = "is not installed" if found is None else f"{found} is installed"
        super().__init__(f"{package} {state}; AutoDist needs {package} {needed}. Fix: {mend}")
