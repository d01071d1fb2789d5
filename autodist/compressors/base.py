"""Compressor: what travels in place of a dense gradient that is all-reduced. Each is one class, in one file."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from fractions import Fraction
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from autodist.compressors.reduction import Gradient, Reduction
from autodist.errors import Place, StrategyError
from autodist.logs.formatting import listed
from autodist.options.fields import check_options, make_nested, option_types
from autodist.options.registry import Registry
from autodist.proto import strategy_pb2

if TYPE_CHECKING:
    import tensorflow as tf

Kind = strategy_pb2.Compressor.Kind

OURS = frozenset(Kind.keys()) - {"NAMED"}
"""Those for which a strategy has fields of their own."""

Made = TypeVar("Made", bound="Compressor")


@dataclasses.dataclass(frozen=True)
class Dense:
    """What is known of a dense gradient before a step runs.

    Attributes:
        shape: length of each axis.
        element_bytes: bytes of one element.
    """

    shape: tuple[int, ...]
    element_bytes: int

    @classmethod
    def of(cls, gradient: Gradient) -> Dense:
        """What is known of a gradient that is being added up."""
        return cls(tuple(gradient.shape.as_list()), gradient.dtype.size)

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def byte_size(self) -> int:
        return self.elements * self.element_bytes


@dataclasses.dataclass(frozen=True)
class Compressor(ABC):
    """Base of the compressors; a user's own is a frozen dataclass that derives from it.

        @register_compressor("SIGNS")
        @dataclass(frozen=True)
        class Signs(Compressor):
            size: float = 0.001

            def bytes_of(self, gradient):
                return gradient.elements  # int8

            def add_up(self, reduction):
                flat = reduction.pack()
                parts = reduction.all_to_all("signs", [tf.cast(tf.sign(flat), tf.int8)])
                summed = reduction.ordered_sum([tf.cast(signs, reduction.dtype) for (signs,) in parts])
                return reduction.unpack(self.size * summed)

    Then `compressor: SIGNS` finds it, and `{kind: SIGNS, size: 0.01}`; without the decorator, module and class do
    (`my_package.Signs`). Every worker runs the script, and so knows it.

    Options are the fields: their names are the keys in the YAML, their types say what is allowed. What a compressor
    remembers from step to step it asks `reduction.memory` for; itself it keeps nothing.

    Raises:
        StrategyError: when it is made with an option of a type or value that is not allowed.
    """

    shorthand: ClassVar[str] = "kind"
    """The YAML may give this alone in place of a mapping: `compressor: FLOAT16`."""

    goes_to_all: ClassVar[bool] = False
    """Whether each worker sends what it has to all others, as where that cannot be added up: W-1 times its bytes in
    place of 2·(W-1)/W times."""

    goes_by_teams: ClassVar[bool] = False
    """Whether it travels by `all_to_all` and `add_by_owners` alone, which teams of workers pass on where there are any;
    what `send` sends goes straight to whom it is for."""

    def __post_init__(self) -> None:
        check_options(self)

    @abstractmethod
    def bytes_of(self, gradient: Dense) -> int:
        """Bytes of what stands for a gradient. A gradient of which these are no fewer travels as it is."""

    @abstractmethod
    def add_up(self, reduction: Reduction) -> list[tf.Tensor]:
        """What the workers' shares of some gradients add up to: one tensor for each of `reduction.gradients`.

        It is called once on every worker, to build a part of the step's graph. Every worker has to end with the same
        bits: a sum that several of them need is made by one and sent, or made by each of the same parts in the order
        of the workers, in the gradient's own type. A worker without replicas (`reduction.computes` is false) has no
        share, sends nothing and remembers nothing; it only learns the sums.
        """

    @property
    def kind(self) -> str:
        """By which a strategy names it."""
        return _COMPRESSORS.name_of(type(self))

    @property
    def text(self) -> str:
        """For people: "POWER_SGD rank 4 with error feedback"."""
        options = self._options()
        is_fed_back = options.pop("error_feedback", False)
        told = "".join(f" {name} {value}" for name, value in options.items())
        return f"{self.kind}{told}" + (" with error feedback" if is_fed_back else "")

    def require_error_feedback(self, error_feedback: bool) -> None:
        """Passes if error feedback was not switched off; for those that need it.

        Raises:
            StrategyError: it was.
        """
        if not error_feedback:
            raise StrategyError(
                f"error_feedback is False, and {self.kind} does not converge without it, since the same part of the "
                "gradient would be lost in every step; remove it."
            )

    def misfit(self, variable: str, is_sparse: bool, dtype: str, is_floating: bool) -> str | None:
        """Why the gradient of a variable cannot be compressed at all, with the mend; None if it can."""
        about = f"{variable} has the compressor {self.text}"
        if is_sparse:
            return (
                f"{about}, and its gradient is sparse: rows and their indices travel, which no compressor takes. Give "
                "it the compressor NONE with a pattern under `variables`, or let Parallax give it to a parameter "
                "server."
            )
        if not is_floating:
            return f"{about}, and its elements are {dtype}, no floating-point type; take the compressor NONE."
        return None

    def saves_bytes(self, gradient: Dense) -> bool:
        """Whether less travels than without it."""
        return self.bytes_of(gradient) < gradient.byte_size

    def bytes_sent(self, gradient: Dense, workers: int) -> Fraction:
        """Bytes that each of so many workers sends for a gradient, on average."""
        saves = self.saves_bytes(gradient)
        if saves and self.goes_to_all:
            return Fraction(self.bytes_of(gradient) * (workers - 1))
        size = self.bytes_of(gradient) if saves else gradient.byte_size
        return Fraction(2 * size * (workers - 1), workers)

    def to_message(self) -> strategy_pb2.Compressor:
        """What a strategy says of it."""
        if self.kind in OURS:
            return strategy_pb2.Compressor(kind=self.kind, **self._options())
        return strategy_pb2.Compressor(kind="NAMED", name=self.kind, options=json.dumps(self._options()))

    @staticmethod
    def from_message(message: strategy_pb2.Compressor) -> Compressor:
        """What a strategy asks for.

        Raises:
            StrategyError: no compressor has this name, or these options.
        """
        return _read(message.SerializeToString(deterministic=True))

    @staticmethod
    def named(kind: str, place: Place | None = None) -> type[Compressor]:
        """The class that `kind` names in an option: a registered name, or module and class.

        Raises:
            StrategyError: there is none.
        """
        return _COMPRESSORS.find(kind, place)

    @staticmethod
    def in_current_names(options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns options, as a YAML has them, with the current name in place of one of AutoDist 2021."""
        return in_current_names(options)

    def _options(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@functools.cache  # thousands of variables say the same
def _read(said: bytes) -> Compressor:
    message = strategy_pb2.Compressor.FromString(said)
    if message.kind not in Kind.values():
        known = listed(Kind.keys())
        raise StrategyError(f"a compressor of kind {message.kind} does not exist; take one of {known}.")
    kind = Kind.Name(message.kind)
    name = message.name if kind == "NAMED" else kind
    made: Compressor = make_nested(f"the compressor {name}", Compressor, {"kind": name, **_told(message, name)})
    return made


def _told(message: strategy_pb2.Compressor, name: str) -> dict[str, Any]:
    """The options that a message tells."""
    if name in OURS:
        return {option: getattr(message, option) for option in option_types(Compressor.named(name))}
    try:
        told: dict[str, Any] = json.loads(message.options or "{}")
    except ValueError as error:
        raise StrategyError(f"the options {message.options!r} of the compressor {name} are no JSON: {error}.") from None
    return told


def register_compressor(name: str) -> Callable[[type[Made]], type[Made]]:
    """Makes a compressor known by a name; a decorator, for a user's own as well.

    Raises:
        StrategyError: when it is no compressor, or another class has the name already.
    """

    def known(compressor: type[Made]) -> type[Made]:
        _read.cache_clear()  # a notebook may bring a class again
        return _COMPRESSORS.register(compressor, name)

    return known


def registered_compressors() -> tuple[str, ...]:
    """Names of all registered compressors, sorted."""
    return _COMPRESSORS.names()


def _fault(found: Any) -> str | None:
    if isinstance(found, type) and issubclass(found, Compressor) and dataclasses.is_dataclass(found):
        return None
    kind = "class that is none" if isinstance(found, type) else type(found).__name__
    return f"a {kind}; a compressor is a frozen dataclass that derives from autodist.compressors.Compressor."


def _load_ours() -> None:
    importlib.import_module("autodist.compressors.ours")


_COMPRESSORS = Registry("compressor", "my_package.MyCompressor", _fault, _load_ours)


log = logging.getLogger("autodist")

OLDER_NAMES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "NoneCompressor": {"kind": "NONE"},
        "HorovodCompressor": {"kind": "FLOAT16"},
        "HorovodCompressorEF": {"kind": "FLOAT16", "error_feedback": True},
    }
)


def in_current_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a compressor's options with its current name in place of an older one, which is logged once."""
    kind = options.get("kind")
    if not isinstance(kind, str) or kind not in OLDER_NAMES:
        return dict(options)
    _warn(kind)
    return {**OLDER_NAMES[kind], **{name: value for name, value in options.items() if name != "kind"}}


@functools.cache
def _warn(kind: str) -> None:
    current = dict(OLDER_NAMES[kind])
    written = current["kind"] if len(current) == 1 else json.dumps(current)
    log.warning(
        "%s is the name that AutoDist of 2021 had for the compressor %s and is deprecated; write `compressor: %s`.",
        kind, current["kind"], written,
    )  # fmt: skip
