"""What all models of the YAML share: strictness, and faults that know where in the model they are."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Model(BaseModel):
    """A frozen value; unknown keys and values of another type are refused, not converted.

    The description of each field says what is allowed there; messages quote it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Fault(ValueError):
    """Raised inside a validator: what is wrong, and where below the validated value.

    Args:
        problem: the value given, why it cannot be used, and what is allowed.
        path: from the validated value to the one at fault.
    """

    def __init__(self, problem: str, *path: str | int) -> None:
        self.problem, self.path = problem, path
        super().__init__(problem)


def _empty_if_null(value: Any) -> Any:
    return {} if value is None else value


# A key whose content is commented out (`ssh:` and nothing below) is null in YAML and means "none of it".
EMPTY_IF_NULL = BeforeValidator(_empty_if_null)
