"""The function call sent to a launched process, and the outcome that it returns."""

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
    "Return arrays, numbers, the result of `model.get_weights()`, or a Keras model; objects that need this run, or "
    "contain TensorFlow functions, cannot be returned. Trained values are then lost, unless the function saved them."
)


@dataclass(frozen=True)
class LaunchedCall:
    """A function that is called on every worker.

    Attributes:
        function: the function; it takes an AutoDist, and then `args`.
        args: the arguments of the function, after the AutoDist.
        spec: the machines, from `ResourceSpec.to_payload`; None: this machine.
        overrides: the number of workers and replicas on this machine.
        builder: builds the strategy; None: the strategy of the machines' YAML.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    spec: str | None
    overrides: CliOverrides
    builder: BuildsStrategy | None


def name_of(function: Callable[..., Any]) -> str:
    """Returns a function's name for messages."""
    return getattr(function, "__name__", None) or type(function).__name__


class LaunchedTraceback(Exception):
    """The traceback of a launched function; the cause of the exception raised by `launch`."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(text)

    def __str__(self) -> str:
        return f"\n{self.text}"


@dataclass(frozen=True)
class Outcome:
    """The result of a call on the chief.

    Attributes:
        value: the pickled return value; None if the function failed.
        error: the pickled exception; None if it cannot be pickled, or if the function did not fail.
        text: the text of the exception.
        trace: its traceback.
    """

    value: bytes | None = None
    error: bytes | None = None
    text: str = ""
    trace: str = ""

    @staticmethod
    def of_error(error: BaseException) -> Outcome:
        trace = "".join(traceback.format_exception(error))
        text = "".join(traceback.format_exception_only(error)).strip()
        try:
            packed = pack(error, "the error", "")
            unpack(packed)
        except Exception:  # noqa: BLE001 - an exception may hold anything: then only its text is returned
            return Outcome(None, None, text, trace)
        return Outcome(None, packed, text, trace)

    def result(self) -> Any:
        """Returns the return value of the function.

        Raises:
            BaseException: the exception of the function, with the chief's traceback as the cause.
            LaunchError: raised in its place if that exception could not be pickled, or cannot be unpickled here.
        """
        return unpack(self.value) if self.value is not None else self._raise()

    def _raise(self) -> NoReturn:
        error: BaseException = LaunchError(self.text)
        if self.error is not None:
            error = unpack(self.error)
        raise error from LaunchedTraceback(self.trace)
