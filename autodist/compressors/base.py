"""Compressor: base class of the encodings of a dense gradient for its all-reduce."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from autodist.compressors.older_names import in_current_names
from autodist.compressors.reduction import Code, Gradient, Reduction
from autodist.errors import Place, StrategyError
from autodist.logs.formatting import listed
from autodist.options.fields import check_options, make_nested, option_types
from autodist.options.registry import Registry
from autodist.proto import strategy_pb2

if TYPE_CHECKING:
    import tensorflow as tf

Kind = strategy_pb2.Compressor.Kind

OURS = frozenset(Kind.keys()) - {"NAMED"}
"""Built-in kinds: the strategy message has fields for their options. The options of other kinds are JSON."""

Made = TypeVar("Made", bound="Compressor")


@dataclasses.dataclass(frozen=True)
class Dense:
    """Properties of a dense gradient that are known before a step runs.

    Attributes:
        shape: length of each axis.
        element_bytes: bytes of one element.
    """

    shape: tuple[int, ...]
    element_bytes: int

    @classmethod
    def of(cls, gradient: Gradient) -> Dense:
        """Returns the properties of a gradient under reduction."""
        return cls(tuple(gradient.shape.as_list()), gradient.dtype.size)

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def byte_size(self) -> int:
        return self.elements * self.element_bytes


@dataclasses.dataclass(frozen=True)
class Compressor(ABC):
    """Base of the compressors; a user's compressor is a frozen dataclass derived from it.

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

    Options select it by name: `compressor: SIGNS` or `{kind: SIGNS, size: 0.01}`; without the decorator, by module and
    class (`my_package.Signs`). Every worker runs the script and therefore has the class.

    The fields are the options: their names are the keys in the YAML, their types define the allowed values. State
    between steps belongs in `reduction.memory`, never in the object.

    Raises:
        StrategyError: an option has a type or value that is not allowed.
    """

    shorthand: ClassVar[str] = "kind"
    """Option that the YAML may give alone in place of a mapping: `compressor: FLOAT16`."""

    goes_to_all: ClassVar[bool] = False
    """True if each worker sends its encoded gradient to all others, because encodings cannot be summed.

    With W workers, each sends (W-1) times the encoded bytes. A ring or an owner would need 2·(W-1)/W times.
    """

    uses_subgroups: ClassVar[bool] = False
    """True if `add_up` communicates only with `all_to_all` and `add_by_owners`.

    These go through subgroups of workers, if the run has any. `send` always sends directly to the recipient.
    """

    def __post_init__(self) -> None:
        check_options(self)

    @abstractmethod
    def bytes_of(self, gradient: Dense) -> int:
        """Returns the bytes of the encoded gradient; a gradient whose encoding is not smaller is sent uncompressed."""

    @abstractmethod
    def add_up(self, reduction: Reduction) -> list[tf.Tensor]:
        """Returns the sums of the workers' shares (see `Reduction`): one tensor for each of `reduction.gradients`.

        It is called once on every worker, to build a part of the step's graph. Every worker must obtain the same bits.
        Either one worker computes a sum and sends it, or each adds the same parts in worker order and in the gradient's
        dtype. A worker without replicas (`reduction.computes` is false) has no share, sends nothing and stores no
        state; it only receives the sums.
        """

    @property
    def value_code(self) -> Code | None:
        """The code of a variable's value, the same bits in each call; None: it compresses gradients alone."""
        return None

    @property
    def kind(self) -> str:
        """The name that selects this compressor in a strategy."""
        return _COMPRESSORS.name_of(type(self))

    @property
    def text(self) -> str:
        """Description for messages, such as "POWER_SGD rank 4 with error feedback"."""
        options = self._options()
        is_fed_back = options.pop("error_feedback", False)
        described = "".join(f" {name} {value}" for name, value in options.items())
        return f"{self.kind}{described}" + (" with error feedback" if is_fed_back else "")

    def require_error_feedback(self, error_feedback: bool) -> None:
        """Checks that error feedback is on; called by compressors that do not converge without it.

        Raises:
            StrategyError: it is off.
        """
        if not error_feedback:
            raise StrategyError(
                f"error_feedback is False, but {self.kind} does not converge without it, because the same part of the "
                "gradient would be lost in every step; remove it."
            )

    def misfit(self, variable: str, is_sparse: bool, dtype: str, is_floating: bool) -> str | None:
        """Returns the reason why a variable's gradient cannot be compressed, and the fix; None if it can be."""
        about = f"{variable} has the compressor {self.text}"
        if is_sparse:
            return (
                f"{about}, but its gradient is sparse: no compressor supports rows and their indices. Give "
                "it the compressor NONE with a pattern under `variables`, or let Parallax give it to a parameter "
                "server."
            )
        if not is_floating:
            return f"{about}, but its dtype {dtype} is not floating-point; use the compressor NONE."
        return None

    def saves_bytes(self, gradient: Dense) -> bool:
        """Returns True if the encoded gradient is smaller than the gradient."""
        return self.bytes_of(gradient) < gradient.byte_size

    def encoded_bytes(self, sent: Dense) -> int:
        """Returns the bytes in which a gradient or a value is sent: encoded if that is smaller."""
        return self.bytes_of(sent) if self.saves_bytes(sent) else sent.byte_size

    def bytes_sent(self, gradient: Dense, workers: int) -> Fraction:
        """Returns the bytes that each of `workers` workers sends for a gradient, on average."""
        size = self.encoded_bytes(gradient)
        if self.goes_to_all and self.saves_bytes(gradient):
            return Fraction(size * (workers - 1))
        return Fraction(2 * size * (workers - 1), workers)

    def to_message(self) -> strategy_pb2.Compressor:
        """Returns this compressor as a message for a strategy."""
        if self.kind in OURS:
            return strategy_pb2.Compressor(kind=self.kind, **self._options())
        return strategy_pb2.Compressor(kind="NAMED", name=self.kind, options=json.dumps(self._options()))

    def bytes_of_value(self, value: Dense) -> int:
        """Returns the bytes of a value that `value_code` has encoded."""
        return self.bytes_of(value)

    def value_bytes(self, value: Dense) -> int:
        """Returns the bytes in which the value of a variable is sent: encoded if that is smaller."""
        return min(self.bytes_of_value(value), value.byte_size)

    @property
    def encoding(self) -> str:
        """Kind and options as JSON, which `from_encoding` reads; "" for NONE."""
        return "" if self.kind == "NONE" else json.dumps({"kind": self.kind, **self._options()})

    @staticmethod
    def from_encoding(encoding: str) -> Compressor:
        """Returns the compressor of an `encoding` that is not ""."""
        return _decode(encoding)

    @staticmethod
    def from_message(message: strategy_pb2.Compressor) -> Compressor:
        """Returns the compressor of a strategy message.

        Raises:
            StrategyError: no compressor has this name, or the compressor does not accept these options.
        """
        return _read(message.SerializeToString(deterministic=True))

    @staticmethod
    def named(kind: str, place: Place | None = None) -> type[Compressor]:
        """Returns the class for the option `kind`: a registered name, or module and class (`my_package.Signs`).

        Raises:
            StrategyError: there is no such compressor.
        """
        return _COMPRESSORS.find(kind, place)

    @staticmethod
    def in_current_names(options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns options of a YAML file, with a compressor name of AutoDist 2021 replaced by the current name."""
        return in_current_names(options)

    def _options(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@functools.cache  # thousands of variables have equal messages
def _read(serialized: bytes) -> Compressor:
    message = strategy_pb2.Compressor.FromString(serialized)
    if message.kind not in Kind.values():
        register = listed(Kind.keys())
        raise StrategyError(f"a compressor of kind {message.kind} does not exist; use one of {register}.")
    kind = Kind.Name(message.kind)
    name = message.name if kind == "NAMED" else kind
    made: Compressor = make_nested(f"the compressor {name}", Compressor, {"kind": name, **_options_of(message, name)})
    return made


@functools.cache
def _decode(encoding: str) -> Compressor:
    made: Compressor = make_nested("value_compressor", Compressor, json.loads(encoding))
    return made


def _options_of(message: strategy_pb2.Compressor, name: str) -> dict[str, Any]:
    """Returns the options of the compressor in a strategy message."""
    if name in OURS:
        return {option: getattr(message, option) for option in option_types(Compressor.named(name))}
    try:
        described: dict[str, Any] = json.loads(message.options or "{}")
    except ValueError as error:
        raise StrategyError(
            f"the options {message.options!r} of the compressor {name} are not JSON: {error}."
        ) from None
    return described


def register_compressor(name: str) -> Callable[[type[Made]], type[Made]]:
    """Registers a compressor under a name; a decorator, also for a user's compressors.

    Raises:
        StrategyError: the class is not a compressor, or another class already has the name.
    """

    def register(compressor: type[Made]) -> type[Made]:
        _read.cache_clear()  # a notebook may define the class again
        _decode.cache_clear()
        return _COMPRESSORS.register(compressor, name)

    return register


def registered_compressors() -> tuple[str, ...]:
    """Returns the names of all registered compressors, sorted."""
    return _COMPRESSORS.names()


def _fault(candidate: Any) -> str | None:
    if isinstance(candidate, type) and issubclass(candidate, Compressor) and dataclasses.is_dataclass(candidate):
        return None
    kind = "class that is not one" if isinstance(candidate, type) else type(candidate).__name__
    return f"a {kind}; a compressor is a frozen dataclass that derives from autodist.compressors.Compressor."


def _load_ours() -> None:
    importlib.import_module("autodist.compressors.built_in")


_COMPRESSORS = Registry("compressor", "my_package.MyCompressor", _fault, _load_ours)
