"""The strategy section: its shape is read here, what its keys mean is for autodist.strategies."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from autodist.errors import Place
from autodist.resources._model import Model
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
