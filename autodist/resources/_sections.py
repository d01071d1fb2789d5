"""The strategy section: its shape is read here, what its keys mean is for autodist.strategies."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from autodist.errors import Place
from autodist.resources._model import Fault, Model
from autodist.resources._plain import plain_copy
from autodist.resources._read import read_text
from autodist.resources._source import KeyPath, Source, as_yaml
from autodist.resources._yaml import read_yaml

_BUILDER = "the name of a strategy builder, such as AllReduce"
_SECTION = f"{_BUILDER}, or a mapping with builder, its options and variables"


class VariableOverride(Model):
    """What the user says of the variables whose names match a pattern.

    Attributes:
        pattern: a regular expression, not compiled yet.
        settings: what stands below it, unchecked.
        place: where it stands; None if it did not come from a file.
    """

    pattern: str
    settings: dict[str, Any]
    place: Place | None = None


class StrategySection(Model):
    """The strategy section of the YAML.

    Attributes:
        builder: name of the strategy builder, unchecked; None: the default one.
        options: every other key but `variables`, unchecked.
        variables: overrides, in the order of the file; the first whose pattern matches a variable wins.
        source: for messages.
    """

    builder: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    variables: tuple[VariableOverride, ...] = ()
    source: Source = Field(default_factory=Source, repr=False)

    @classmethod
    def from_plain(cls, data: Any, source: Source) -> StrategySection:
        """Reads what stands under `strategy`: a mapping, or the name of a builder alone.

        Raises:
            ResourceSpecError: it is neither, `builder` is no name, `variables` does not map patterns to mappings.
        """
        path: KeyPath = ("strategy",)
        if isinstance(data, str) and data:
            return cls(builder=data, source=source)
        if not isinstance(data, dict):
            raise source.error(path, f"{as_yaml(data)} is not allowed; allowed: {_SECTION}")
        near = difflib.get_close_matches("builder", map(str, data), n=1, cutoff=0.6)
        if near and "builder" not in data:
            raise source.error((*path, "builder"), f"missing (is {near[0]} meant to be it?); allowed: {_BUILDER}")
        builder = data.get("builder")
        if "builder" in data and (not isinstance(builder, str) or not builder):
            raise source.error((*path, "builder"), f"{as_yaml(builder)} is not a name; allowed: {_BUILDER}")
        options = {key: value for key, value in data.items() if key not in ("builder", "variables")}
        overrides = _read_overrides(data.get("variables"), source)
        return cls(builder=builder, options=options, variables=overrides, source=source)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> StrategySection | None:
        """Reads the section of a YAML file, whatever else stands in it; None if it has none.

        Raises:
            ResourceSpecError: the file or the section cannot be read.
        """
        file = os.fsdecode(path)
        data, source = read_yaml(read_text(file), file)
        section = data.get("strategy") if isinstance(data, dict) else None
        return None if section is None else cls.from_plain(section, source)

    @classmethod
    def from_script(cls, data: str | Mapping[str, Any]) -> StrategySection:
        """Reads what the YAML would have under `strategy`, given from Python; it is copied.

        Raises:
            ResourceSpecError: it cannot be used.
        """
        return cls.from_plain(plain_copy(data), Source())

    def place(self, *path: str | int) -> Place | None:
        """Where a key below `strategy` stands, or, if it is missing there, where the thing around it does.

        Args:
            path: keys and positions from the section inwards: `place("chunk_size")`,
                `place("variables", "embedding/.*", "partition")`; none for the section itself.

        Returns:
            None if the section did not come from a file.
        """
        return self.source.place(("strategy", *path))

    def to_dict(self) -> dict[str, Any]:
        """The section as it stands in the YAML."""
        overrides = {override.pattern: override.settings for override in self.variables}
        named = {} if self.builder is None else {"builder": self.builder}
        return {**named, **self.options, **({"variables": overrides} if overrides else {})}


def _read_overrides(data: Any, source: Source) -> tuple[VariableOverride, ...]:
    path: KeyPath = ("strategy", "variables")
    if data is None:
        return ()
    allowed = "allowed: a mapping of patterns of names to settings, such as {synchronizer: PS}"
    if not isinstance(data, Mapping):
        raise source.error(path, f"{as_yaml(data)} is not a mapping; {allowed}")
    for pattern, settings in data.items():
        if not isinstance(settings, dict):
            raise source.error((*path, pattern), f"{as_yaml(settings)} is not a mapping; {allowed}")
    return tuple(
        VariableOverride(pattern=pattern, settings=settings, place=source.place((*path, pattern)))
        for pattern, settings in data.items()
    )


_LONGEST_MINUTES = 100_000
_MOST_STEPS = 10**12

CHECKPOINT = (
    "a mapping of `folder`, `every_steps`, `every_minutes`, `keep` and `on_preempt`, such as {folder: checkpoints, "
    "every_minutes: 10}"
)


class CheckpointSection(Model):
    """Where, and how often, what is trained is saved without a line of the script.

    Attributes:
        folder: on the chief's machine; made absolute when it is read.
        every_steps: of training, after which it is saved; None: not by them.
        every_minutes: likewise, by the chief's clock.
        keep: how many checkpoints stay.
        on_preempt: whether it is saved, too, when a worker gets SIGTERM, which ends the run after that.
    """

    folder: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")] = Field(
        description="the path of a folder on the chief's machine"
    )
    every_steps: int | None = Field(
        default=None, ge=1, le=_MOST_STEPS, description="a whole number of training steps, at least 1"
    )
    every_minutes: float | None = Field(
        default=None, gt=0, le=_LONGEST_MINUTES, allow_inf_nan=False, description="a number of minutes above 0"
    )
    keep: int = Field(default=3, ge=1, le=_MOST_STEPS, description="how many checkpoints stay, at least 1")

    on_preempt: bool = Field(default=False, description="true or false")

    @field_validator("folder")
    @classmethod
    def _make_absolute(cls, path: str) -> str:
        """The script may have gone elsewhere when it is used."""
        if "://" in path:
            raise Fault(f"{path} is on no file system of a machine; allowed: the path of a folder")
        return os.path.abspath(os.path.expanduser(path))

    @model_validator(mode="after")
    def _check_saves(self) -> CheckpointSection:
        if self.every_steps is None and self.every_minutes is None and not self.on_preempt:
            raise Fault(
                "neither every_steps nor every_minutes says how often, nor is on_preempt true; allowed: one of them, "
                "or several"
            )
        return self


_Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]

SYNC = "a mapping of `folder` and `exclude`, such as {folder: ., exclude: [data, '*.ckpt']}"


class Sync(Model):
    """What every node that is reached over SSH gets, at the same path as here.

    Attributes:
        folder: on the chief's machine; made absolute when it is read.
        exclude: names of files and folders that are left out wherever they stand, or, with a /, their paths below the
            folder; `*`, `?` and `[…]` as in a shell.
    """

    folder: _Line = Field(default=".", description="the path of a folder on the chief's machine")
    exclude: Annotated[tuple[_Line, ...], Field(strict=False)] = Field(
        default=(), description="a list of names or patterns, such as [data, '*.ckpt', logs/old]"
    )

    @field_validator("folder")
    @classmethod
    def _make_absolute(cls, path: str) -> str:
        """The script may have gone elsewhere when it is used."""
        return os.path.abspath(os.path.expanduser(path))


LONGEST = 1_000_000
"""Seconds; some eleven days."""


def _limit(default: float) -> Any:
    allowed = f"a number of seconds above 0, at most {LONGEST}"
    return Field(default=default, gt=0, le=LONGEST, allow_inf_nan=False, description=allowed)


class Timeouts(Model):
    """Keys of the YAML that limit how long a run waits, in seconds. What is missed says which of them to raise.

    Where this machine has more to do than it has cores, and while a process is suspended, seconds count for less:
    limits are for what a process could have done in that time (`autodist.cluster.load_adjusted_clock`).

    Attributes:
        connect_timeout: for reaching a machine over SSH: one that does not answer yet, since it boots, or that admits
            no more logins is tried again for so long. It limits each step of a connection, too: the server's greeting,
            logging in.
        reach_timeout: until every machine has said what it is, from when it should have been reached.
        join_timeout: in a given cluster, until the processes that its scheduler starts have met.
        start_timeout: in the chief's first step, until every other worker's script has come to it.
        silence_timeout: without a word from the other end of an SSH connection before it counts as lost. TCP sends what
            was lost again after ever longer pauses: a link that was cut is silent for up to twice as long as it was
            cut. So by default ten seconds and more without a network do no harm.
        stall_timeout: in one step, or after the end of the chief's script, from which on a worker whose script has
            ended counts as one that will never come.
        answer_timeout: that a worker's process may take to say what it does, while the chief waits for it.
        deadlock_timeout: from which on workers that are all within steps, and compute nothing, count as waiting for one
            another. A step may wait for something else than workers, a disk far away, say.
        cause_timeout: to learn why another worker went away, once TensorFlow has seen that it did; and for which a
            worker whose script fails before the chief's first step lets the chief fail of the same first.
        stop_timeout: between asking a script to end (SIGTERM) and ending it (SIGKILL), where a run failed.
        end_timeout: for the process of a script that has ended well: exit handlers, threads, TensorFlow itself.
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
