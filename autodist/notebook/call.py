"""What a launched process does, and what comes of it: what goes between it and the one that launches it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from autodist.errors import LaunchError
from autodist.notebook.pickled import pack, unpack
from autodist.runs.cli_overrides import CliOverrides
from autodist.strategies import BuildsStrategy

RETURNS = (
    "Return arrays, numbers, what `model.get_weights()` gives, or a Keras model; anything that needs this run, or is "
    "made of functions of TensorFlow, stays there. What was trained is lost with it, unless the function has saved it."
)


@dataclass(frozen=True)
class LaunchedCall:
    """A function that is called on every worker.

    Attributes:
        function: takes an AutoDist, and then `args`.
        args: of the function.
        spec: the machines, as `ResourceSpec.to_payload` has them; None: this machine.
        asked: of this machine, so many workers and replicas.
        builder: decides the strategy; None: what the machines' YAML says.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    spec: str | None
    asked: CliOverrides
    builder: BuildsStrategy | None


def name_of(function: Callable[..., Any]) -> str:
    """A function's name in messages."""
    return getattr(function, "__name__", None) or type(function).__name__


class LaunchedTraceback(Exception):
    """Where a launched function has failed: the cause of what is raised where it was launched."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(text)

    def __str__(self) -> str:
        return f"\n{self.text}"


@dataclass(frozen=True)
class Outcome:
    """How a call has ended, on the chief.

    Attributes:
        value: what the function returned, packed; None if it has failed.
        error: what it raised, packed; None if that cannot be, or if it has not failed.
        told: that error in words.
        trace: where it was raised.
    """

    value: bytes | None = None
    error: bytes | None = None
    told: str = ""
    trace: str = ""

    @staticmethod
    def of_error(error: BaseException) -> Outcome:
        trace = "".join(traceback.format_exception(error))
        told = "".join(traceback.format_exception_only(error)).strip()
        try:
            packed = pack(error, "the error", "")
            unpack(packed)
        except Exception:  # noqa: BLE001 - an error may hold anything: then its words are what comes back
            return Outcome(None, None, told, trace)
        return Outcome(None, packed, told, trace)

    def result(self) -> Any:
        """What the function returned.

        Raises:
            BaseException: what the function raised, of which the chief's traceback is the cause.
            LaunchError: in its place, where it cannot be made here.
        """
        return unpack(self.value) if self.value is not None else self._raise()

    def _raise(self) -> NoReturn:
        error: BaseException = LaunchError(self.told)
        if self.error is not None:
            error = unpack(self.error)
        raise error from LaunchedTraceback(self.trace)
