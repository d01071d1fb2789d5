"""Models of the YAML sections. The strategy section is only parsed here; autodist.strategies interprets its keys."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from autodist.errors import Place
from autodist.resources._model import Fault, KeyPath, Line, Model, Source, as_yaml
from autodist.resources._plain import plain_copy
from autodist.resources._yaml import read_text, read_yaml

_BUILDER = "the name of a strategy builder, such as AllReduce"
_SECTION = f"{_BUILDER}, or a mapping with builder, its options and variables"


class VariableOverride(Model):
    """Settings for the variables whose names match a pattern.

    Attributes:
        pattern: a regular expression, not compiled yet.
        settings: the mapping below the pattern, unchecked.
        place: its position; None if it did not come from a file.
    """

    pattern: str
    settings: dict[str, Any]
    place: Place | None = None


class StrategySection(Model):
    """The strategy section of the YAML.

    Attributes:
        builder: name of the strategy builder, unchecked; None: the default one.
        options: all other keys except `variables`, unchecked.
        variables: overrides, in the order of the file; the first matching pattern applies.
        source: the file and the lines of the values, for messages.
    """

    builder: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    variables: tuple[VariableOverride, ...] = ()
    source: Source = Field(default_factory=Source, repr=False)

    @classmethod
    def from_plain(cls, data: Any, source: Source) -> StrategySection:
        """Reads the value of `strategy`: a mapping, or the name of a builder.

        Raises:
            ResourceSpecError: it is neither, `builder` is not a name, or `variables` does not map patterns to mappings.
        """
        path: KeyPath = ("strategy",)
        if isinstance(data, str) and data:
            return cls(builder=data, source=source)
        if not isinstance(data, dict):
            raise source.error(path, f"{as_yaml(data)} is not allowed; allowed: {_SECTION}")
        near = difflib.get_close_matches("builder", map(str, data), n=1, cutoff=0.6)
        if near and "builder" not in data:
            raise source.error((*path, "builder"), f"missing (is {near[0]} a misspelling of it?); allowed: {_BUILDER}")
        builder = data.get("builder")
        if "builder" in data and (not isinstance(builder, str) or not builder):
            raise source.error((*path, "builder"), f"{as_yaml(builder)} is not a name; allowed: {_BUILDER}")
        options = {key: value for key, value in data.items() if key not in ("builder", "variables")}
        overrides = _read_overrides(data.get("variables"), source)
        return cls(builder=builder, options=options, variables=overrides, source=source)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> StrategySection | None:
        """Reads the section of a YAML file and ignores the rest of the file; returns None if there is no section.

        Raises:
            ResourceSpecError: the file or the section cannot be read.
        """
        file = os.fsdecode(path)
        data, source = read_yaml(read_text(file), file)
        section = data.get("strategy") if isinstance(data, dict) else None
        return None if section is None else cls.from_plain(section, source)

    @classmethod
    def from_script(cls, data: str | Mapping[str, Any]) -> StrategySection:
        """Reads a copy of a value that Python code passed in place of the YAML's `strategy`.

        Raises:
            ResourceSpecError: the value is not allowed.
        """
        return cls.from_plain(plain_copy(data), Source())

    def place(self, *path: str | int) -> Place | None:
        """Returns the position of a key below `strategy`; for a missing key, that of the closest enclosing one.

        Args:
            path: keys and positions from the section inwards: `place("chunk_size")`,
                `place("variables", "embedding/.*", "partition")`; none for the section itself.

        Returns:
            None if the section did not come from a file.
        """
        return self.source.place(("strategy", *path))

    def to_dict(self) -> dict[str, Any]:
        """Returns the section as YAML would hold it."""
        overrides = {override.pattern: override.settings for override in self.variables}
        named = {} if self.builder is None else {"builder": self.builder}
        return {**named, **self.options, **({"variables": overrides} if overrides else {})}


def _read_overrides(data: Any, source: Source) -> tuple[VariableOverride, ...]:
    path: KeyPath = ("strategy", "variables")
    if data is None:
        return ()
    allowed = "allowed: a mapping of name patterns to settings, such as {synchronizer: PS}"
    if not isinstance(data, Mapping):
        raise source.error(path, f"{as_yaml(data)} is not a mapping; {allowed}")
    for pattern, settings in data.items():
        if not isinstance(settings, dict):
            raise source.error((*path, pattern), f"{as_yaml(settings)} is not a mapping; {allowed}")
    return tuple(
        VariableOverride(pattern=pattern, settings=settings, place=source.place((*path, pattern)))
        for pattern, settings in data.items()
    )


def _make_absolute(path: str) -> str:
    """Makes a path absolute when it is read, since the script may change its directory before it is used."""
    return os.path.abspath(os.path.expanduser(path))


def _check_local(path: str) -> str:
    if "://" in path:
        raise Fault(f"{path} is not on a machine's file system; allowed: the path of a folder")
    return path


_Folder = Annotated[Line, AfterValidator(_make_absolute)]
# One validator: of several beside a `Field`, pydantic 2.11.0 calls the last alone.
_LocalFolder = Annotated[Line, AfterValidator(lambda folder: _make_absolute(_check_local(folder)))]


_LONGEST_MINUTES = 100_000
_MOST_STEPS = 10**12

CHECKPOINT = (
    "a mapping of `folder`, `every_steps`, `every_minutes`, `keep` and `on_preempt`, such as {folder: checkpoints, "
    "every_minutes: 10}"
)


class CheckpointSection(Model):
    """Automatic checkpoints: the folder and the schedule. The script needs no code for them.

    Attributes:
        folder: the path on the chief's machine; made absolute when it is read.
        every_steps: number of training steps between checkpoints; None: steps do not count.
        every_minutes: minutes between checkpoints by the chief's clock; None: time does not count.
        keep: number of checkpoints to keep.
        on_preempt: True to save also when a worker receives SIGTERM, which then ends the run.
    """

    folder: _LocalFolder = Field(description="the path of a folder on the chief's machine")
    every_steps: int | None = Field(
        default=None, ge=1, le=_MOST_STEPS, description="a whole number of training steps, at least 1"
    )
    every_minutes: float | None = Field(
        default=None, gt=0, le=_LONGEST_MINUTES, allow_inf_nan=False, description="a number of minutes above 0"
    )
    keep: int = Field(default=3, ge=1, le=_MOST_STEPS, description="the number of checkpoints to keep, at least 1")

    on_preempt: bool = Field(default=False, description="true or false")

    @model_validator(mode="after")
    def _check_saves(self) -> CheckpointSection:
        if self.every_steps is None and self.every_minutes is None and not self.on_preempt:
            raise Fault(
                "neither every_steps nor every_minutes is set, nor is on_preempt true; allowed: one of them, or several"
            )
        return self


METRICS = "a mapping of `folder`, `every_steps` and `tensorboard`, such as {folder: metrics, every_steps: 100}"


class MetricsSection(Model):
    """Metrics that the chief writes while it trains.

    Attributes:
        folder: the path on the chief's machine; made absolute when it is read.
        every_steps: number of training steps between two lines.
        tensorboard: True to write the same numbers as scalars for TensorBoard.
    """

    folder: _LocalFolder = Field(description="the path of a folder on the chief's machine")
    every_steps: int = Field(
        default=100, ge=1, le=_MOST_STEPS, description="a whole number of training steps, at least 1"
    )
    tensorboard: bool = Field(default=False, description="true or false")


SYNC = "a mapping of `folder` and `exclude`, such as {folder: ., exclude: [data, '*.ckpt']}"


class Sync(Model):
    """The folder that is copied to every node reached over SSH, to the same path.

    Attributes:
        folder: the path on the chief's machine; made absolute when it is read.
        exclude: names of files and folders that are left out at every depth, or, with a /, their paths below the
            folder; `*`, `?` and `[…]` as in a shell.
    """

    folder: _Folder = Field(default=".", description="the path of a folder on the chief's machine")
    exclude: Annotated[tuple[Line, ...], Field(strict=False)] = Field(
        default=(), description="a list of names or patterns, such as [data, '*.ckpt', logs/old]"
    )


LONGEST = 1_000_000
"""Seconds; about eleven days."""


def _limit(default: float) -> Any:
    allowed = f"a number of seconds above 0, at most {LONGEST}"
    return Field(default=default, gt=0, le=LONGEST, allow_inf_nan=False, description=allowed)


class Timeouts(Model):
    """Timeouts of a run, in seconds. An error about a missed timeout names the key to raise.

    A timeout limits the work that a process could have done in that time: it is extended while a process is suspended
    or this machine is overloaded (`autodist.cluster.timeouts`).

    Attributes:
        connect_timeout: the time for reaching a machine over SSH. Until then, a machine that still boots or admits no
            more logins is tried again. The timeout also limits each step of a connection: the server's greeting, the
            login.
        reach_timeout: the time until every machine has reported its facts; with SSH, `connect_timeout` is added.
        join_timeout: with `nodes: given`, the time until all processes that the scheduler starts have joined.
        start_timeout: the time in the chief's first step until every other worker's script has reached it.
        silence_timeout: the time without data from the other end of an SSH connection after which it counts as lost.
            TCP retransmits after ever longer pauses: after an outage a link stays silent for up to twice as long as
            the outage. With the default, an outage of ten seconds or a little more does no harm.
        stall_timeout: the time in one step, or after the end of the chief's script, after which workers no longer wait
            for one whose script has ended.
        answer_timeout: the time for a worker's process to report its state while the chief waits for it.
        deadlock_timeout: the time after which workers that are all inside steps and compute nothing count as waiting
            for each other. A step may also wait for something other than workers, such as a remote disk.
        cause_timeout: the time to find the reason why another worker disappeared, once TensorFlow has noticed it. If a
            worker's script fails before the chief's first step, the worker waits as long for the chief to fail with the
            same error.
        stop_timeout: the time between SIGTERM and SIGKILL for a script of a failed run.
        end_timeout: the time from the successful end of a script to the end of its process: exit handlers, threads,
            TensorFlow itself.
    """

    connect_timeout: float = _limit(60.0)
    reach_timeout: float = _limit(60.0)
    join_timeout: float = _limit(300.0)
    start_timeout: float = _limit(300.0)
    silence_timeout: float = _limit(25.0)
    stall_timeout: float = _limit(60.0)
    answer_timeout: float = _limit(60.0)
    deadlock_timeout: float = _limit(300.0)
    cause_timeout: float = _limit(8.0)
    stop_timeout: float = _limit(3.0)
    end_timeout: float = _limit(300.0)
