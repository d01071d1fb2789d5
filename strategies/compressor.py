"""Compressor: what travels in place of a dense gradient that is all-reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from autodist.errors import StrategyError
from autodist.proto import strategy_pb2
from autodist.strategies.options import check_options

CompressorKind = Literal["NONE", "FLOAT16", "BFLOAT16", "POWER_SGD", "TOP_K"]

DEFAULT_RANK = 4
"""Columns of PowerSGD's matrices: Vogels et al. (below) reach the accuracy of plain SGD with 2 to 4."""

DEFAULT_FRACTION = 0.01
"""Share of the elements that top-k sends; Lin et al. (below) end at a tenth of it, after epochs with more."""

ALWAYS_FED_BACK = ("POWER_SGD", "TOP_K")


@dataclass(frozen=True)
class Compressor:
    """What travels in place of a dense gradient; all kinds but NONE lose something.

    FLOAT16 and BFLOAT16 halve what float32 sends. FLOAT16 keeps 11 bits, and loses small elements beside large ones;
    BFLOAT16 keeps 8 bits, and float32's range. POWER_SGD sends two thin matrices whose product is near the gradient.
    TOP_K sends the elements of largest magnitude.

    With error feedback, what was lost in one step is added to the gradient of the next, so that nothing is lost for
    good. POWER_SGD and TOP_K do not converge without it.

    Sources: T. Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
    NeurIPS 2019; Y. Lin et al., "Deep Gradient Compression", ICLR 2018; S. P. Karimireddy et al., "Error Feedback
    Fixes SignSGD and other Gradient Compression Schemes", ICML 2019.

    Attributes:
        kind: which of them.
        error_feedback: None: as the kind needs it, so false for FLOAT16 and BFLOAT16.
        rank: POWER_SGD alone: columns of the thin matrices; None: 4.
        fraction: TOP_K alone: share of the elements that travel, above 0 and at most 1; None: 0.01.

    Raises:
        StrategyError: when an option is out of range or belongs to another kind.
    """

    shorthand: ClassVar[str] = "kind"
    """The YAML may give this alone in place of a mapping: `compressor: FLOAT16`."""

    kind: CompressorKind
    error_feedback: bool | None = None
    rank: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    fraction: Annotated[float, Field(gt=0, le=1)] | None = None

    def __post_init__(self) -> None:
        check_options(self)
        for option, kind in (("rank", "POWER_SGD"), ("fraction", "TOP_K")):
            if getattr(self, option) is not None and self.kind != kind:
                raise StrategyError(f"{option} is an option of {kind}, and the kind is {self.kind}; remove it.")
        if self.error_feedback is False and self.kind in ALWAYS_FED_BACK:
            raise StrategyError(
                f"error_feedback is False, and {self.kind} does not converge without it, since the same part of the "
                "gradient would be lost in every step; remove it."
            )
        if self.error_feedback and self.kind == "NONE":
            raise StrategyError("error_feedback is True, and NONE loses nothing that could be fed back; remove it.")

    def to_proto(self) -> strategy_pb2.Compressor:
        """The message that the kernels read."""
        return strategy_pb2.Compressor(
            kind=self.kind,
            error_feedback=bool(self.error_feedback) or self.kind in ALWAYS_FED_BACK,
            rank=(self.rank or DEFAULT_RANK) if self.kind == "POWER_SGD" else 0,
            fraction=(self.fraction or DEFAULT_FRACTION) if self.kind == "TOP_K" else 0.0,
        )


NO_COMPRESSOR = Compressor("NONE")
"""Gradients travel as they are."""


def compresses(synchronizer: strategy_pb2.AllReduce) -> bool:
    """Whether a gradient is made smaller before it travels."""
    return synchronizer.compressor.kind != strategy_pb2.Compressor.NONE


def compressor_text(compressor: strategy_pb2.Compressor) -> str:
    """A compressor for people: "POWER_SGD rank 4 with error feedback"."""
    text = strategy_pb2.Compressor.Kind.Name(compressor.kind)
    if compressor.kind == strategy_pb2.Compressor.POWER_SGD:
        text += f" rank {compressor.rank}"
    if compressor.kind == strategy_pb2.Compressor.TOP_K:
        text += f" {100 * compressor.fraction:g} %"
    return f"{text} with error feedback" if compressor.error_feedback else text
