"""Base class of the YAML models, and the error that their validators raise with the path to the value."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Model(BaseModel):
    """A frozen value; unknown keys and values of another type are refused, not converted.

    The description of each field states the allowed values; messages quote it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Fault(ValueError):
    """Error raised inside a validator, with the path from the validated value to the fault.

    Args:
        problem: the value, the reason, and the allowed values.
        path: from the validated value to the faulty one.
    """

    def __init__(self, problem: str, *path: str | int) -> None:
        self.problem, self.path = problem, path
        super().__init__(problem)


def _empty_if_null(value: Any) -> Any:
    return {} if value is None else value


# In YAML a key without content (`ssh:` with nothing below, or only comments) is null and means "none".
EMPTY_IF_NULL = BeforeValidator(_empty_if_null)
