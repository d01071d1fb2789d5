"""Base class of the YAML models, and their errors, which name the file and the line of a value."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from autodist.errors import Place, ResourceSpecError
from autodist.resources._limits import LONGEST_SHOWN


class Model(BaseModel):
    """A frozen value; unknown keys and values of another type are refused, not converted.

    The description of each field states the allowed values; messages quote it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Fault(ValueError):
    """Error raised inside a validator, with the path from the validated value to the fault.

    Args:
        problem: the value, the reason, and the allowed values.
        path: the path from the validated value to the faulty one.
    """

    def __init__(self, problem: str, *path: str | int) -> None:
        self.problem, self.path = problem, path
        super().__init__(problem)


def _empty_if_null(value: Any) -> Any:
    return {} if value is None else value


# In YAML a key without content (`ssh:` with nothing below, or only comments) is null and means "none".
EMPTY_IF_NULL = BeforeValidator(_empty_if_null)

Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]


_MOST = 20  # faults in one message

_WITHOUT_ITEMS = ("sync", "checkpoint", "metrics")

MISSING, UNKNOWN_KEY = "missing", "extra_forbidden"  # pydantic's names of these errors


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Returns the message for an unknown key, with the most similar known one."""
    known = sorted(known)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    guess = f"; did you mean {near[0]}?" if near else ";"
    return f"unknown key{guess} allowed: {', '.join(known)}"


def to_spec_error(
    error: ValidationError, source: Source, root: type[Model], inner: dict[str, type[Model]], hidden: Sequence[str]
) -> ResourceSpecError:
    """Returns one error for all validation errors: the first in the order of the file, then the others, a line each.

    Args:
        error: the error of validating `root`.
        source: the positions of the values.
        root: the model.
        inner: the model of the items of each field; for those of `_WITHOUT_ITEMS`, their own model.
        hidden: the fields of the root that are not keys of the YAML.
    """
    faults = sorted(error.errors(), key=lambda details: source.line(_path(details)))
    (path, problem), *others = [(_path(details), _explain(details, root, inner, hidden)) for details in faults[:_MOST]]
    also = "".join(f"\n  also {source.place(path) or key_text(path)}: {text}" for path, text in others)
    more = f"\n  and {len(faults) - _MOST} more" if len(faults) > _MOST else ""
    return source.error(path, problem + also + more)


def _path(details: ErrorDetails) -> KeyPath:
    # For a key of a mapping that is refused, pydantic adds "[key]" to the path.
    path: KeyPath = tuple(step for step in details["loc"] if step != "[key]")
    fault = details.get("ctx", {}).get("error")
    return (*path, *fault.path) if isinstance(fault, Fault) else path


def _explain(details: ErrorDetails, root: type[Model], inner: dict[str, type[Model]], hidden: Sequence[str]) -> str:
    fault = details.get("ctx", {}).get("error")
    if isinstance(fault, Fault):
        return fault.problem
    path = _path(details)
    depth = 1 if path[0] in _WITHOUT_ITEMS else 2
    model = inner.get(str(path[0]), root) if len(path) > depth else root
    fields = {name: field for name, field in model.model_fields.items() if model is not root or name not in hidden}
    if details["type"] == UNKNOWN_KEY:
        return unknown_key(str(path[-1]), fields)
    name = str(path[0] if model is root else path[depth])
    allowed = fields[name].description
    if len(path) == 2 == depth and str(path[0]) in inner:  # a node or a group as a whole
        allowed = f"a mapping with the keys {', '.join(inner[str(path[0])].model_fields)}"
    if details["type"] == MISSING:
        return f"missing; allowed: {allowed}"
    # An environment variable may hold a secret, so its value is not shown.
    value_text = "this" if name == "shared_envs" else as_yaml(details["input"])
    return f"{value_text} is not allowed; allowed: {allowed}"


KeyPath = tuple[str | int, ...]

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")


def key_text(path: KeyPath) -> str:
    """Formats a path for messages.

    >>> key_text(("nodes", 1, "port"))
    'nodes[1].port'
    >>> key_text(("strategy", "variables", "embedding/.*"))
    'strategy.variables["embedding/.*"]'
    """
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif _PLAIN_KEY.match(step):
            text += f".{step}" if text else step
        else:
            text += f'["{step}"]'
    return text


def as_yaml(value: Any) -> str:
    """Formats a value as YAML, shortened; for a list or mapping, which may hold secrets, returns only its kind."""
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


@dataclass(frozen=True)
class Source:
    """The origin of the values of a spec.

    Attributes:
        file: path as the user wrote it; None if the values came from Python.
        lines: line of each key and list item, counted from 1, by its text (`key_text`).
    """

    file: str | None = None
    lines: Mapping[str, int] = field(default_factory=dict)

    def line(self, path: KeyPath) -> int:
        """Returns the line of `path`; for a missing key, that of the closest enclosing one in the file."""
        while path and key_text(path) not in self.lines:
            path = path[:-1]
        return self.lines.get(key_text(path), 1)

    def place(self, path: KeyPath) -> Place | None:
        """Returns the position of `path`; None if the values came from Python."""
        return None if self.file is None else Place(self.file, self.line(path), key_text(path))

    def error(self, path: KeyPath, problem: str) -> ResourceSpecError:
        """Returns the error for the value at `path`; without a file its text starts with the key."""
        place = self.place(path)
        return (
            ResourceSpecError(problem, place)
            if place or not path
            else ResourceSpecError(f"{key_text(path)}: {problem}")
        )
