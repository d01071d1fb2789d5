"""ParameterServer: one worker, the owner, holds the variable, sums the gradients, and applies the update once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autodist.compressors import NO_COMPRESSOR, Compressor, Dense
from autodist.errors import StrategyError
from autodist.options.fields import OptionError
from autodist.placement.group import Group
from autodist.placement.synchrony import Synchrony, SyncMode
from autodist.proto import strategy_pb2
from autodist.synchronizers.base import Synchronizer
from autodist.synchronizers.traffic import INDEX_BYTES, Piece, Sent


@dataclass(frozen=True)
class ParameterServer(Synchronizer):
    """Parameter server for a variable, as in the strategy message.

    Attributes:
        owner: index of the worker that owns the variable.
        asynchronous: True to apply each worker's gradient as it arrives.
        staleness: the number of steps that a worker may be ahead of the slowest.
        local_proxy: True if every worker holds a cached copy that its replicas read, refreshed once a step.
        layer: the layer with which the value is gathered twice a step, from 1 in the order of use; 0: each read fetches
            it separately.
        value_compressor: encodes the values that refresh cached copies. Updates read the owner's exact value.
    """

    owner: int = 0
    asynchronous: bool = False
    staleness: int = 0
    local_proxy: bool = False
    layer: int = 0
    value_compressor: Compressor = NO_COMPRESSOR

    message: ClassVar[type] = strategy_pb2.ParameterServer
    compressor_option: ClassVar[str] = "value_compressor"

    @classmethod
    def from_message(cls, message: strategy_pb2.ParameterServer) -> ParameterServer:
        if message.staleness < 0:
            raise OptionError(
                "staleness",
                f"has staleness {message.staleness}, but a worker cannot be fewer than 0 steps ahead; use 0 or more.",
            )
        if message.layer < 0:
            raise OptionError("layer", f"has the layer {message.layer}; layers are numbered from 1.")
        try:
            compressor = Compressor.from_message(message.value_compressor)
        except StrategyError as error:
            raise OptionError("value_compressor", f"cannot be compressed: {error.problem}") from None
        return cls(
            message.owner, message.asynchronous, message.staleness, message.local_proxy, message.layer, compressor
        )

    def to_message(self) -> strategy_pb2.ParameterServer:
        lossy = None if self.value_compressor == NO_COMPRESSOR else self.value_compressor.to_message()
        return strategy_pb2.ParameterServer(
            owner=self.owner,
            asynchronous=self.asynchronous,
            staleness=self.staleness,
            local_proxy=self.local_proxy,
            layer=self.layer,
            value_compressor=lossy,
        )

    @property
    def synchrony(self) -> Synchrony:
        mode = (
            SyncMode.ASYNCHRONOUS if self.asynchronous else SyncMode.STALE if self.staleness else SyncMode.SYNCHRONOUS
        )
        return Synchrony(mode, self.staleness)

    @property
    def has_cached_copy(self) -> bool:
        return self.local_proxy

    @property
    def value_encoding(self) -> str:
        return self.value_compressor.encoding

    @property
    def gathered_with(self) -> int:
        return 0 if self.local_proxy or self.synchrony.runs_ahead else self.layer

    @property
    def inexact(self) -> str | None:
        if self.synchrony.runs_ahead:
            return "is updated without waiting for all workers"
        return None if self.value_compressor == NO_COMPRESSOR else "has a value_compressor, which rounds"

    def misfit(self, piece: Piece) -> str | None:
        if self.value_compressor == NO_COMPRESSOR:
            return None
        about = f"{piece.name} has the value_compressor {self.value_compressor.text}"
        if self.value_compressor.value_code is None:
            return f"{about}, which compresses gradients alone; use INT8, FLOAT8, BFLOAT16 or FLOAT16."
        if getattr(self.value_compressor, "error_feedback", False):
            return f"{about}, but the owner keeps the exact value, so no error is lost; remove error_feedback."
        if not piece.is_floating:
            return f"{about}, but its dtype {piece.dtype} is not floating-point; use the value_compressor NONE."
        if self.asynchronous:
            return f"{about} and sync: false, where each worker reads the owner's value itself; use sync: true or NONE."
        if not self.local_proxy:
            rows = ", of which a step reads the rows" if piece.is_sparse else ""
            return (
                f"{about}, which encodes values for cached copies, and it has none{rows}. Use the value_compressor "
                "NONE for it, or local_proxy_variable: true."
            )
        return None

    @property
    def way(self) -> str:
        return "PS"

    @property
    def text(self) -> str:
        words = ["PS"]
        words += ["asynchronous"] if self.asynchronous else []
        words += [f"staleness {self.staleness}"] if self.staleness else []
        lossy = "" if self.value_compressor == NO_COMPRESSOR else f" in {self.value_compressor.text}"
        words += [f"proxies{lossy}"] if self.local_proxy else []
        words += [f"gathered with layer {self.layer}"] if self.gathered_with else []
        return ", ".join(words)

    def value_bytes(self, piece: Piece) -> int:
        """Returns the bytes of a value that is sent whole."""
        return self.value_compressor.value_bytes(Dense(piece.shape, piece.element_bytes))

    def add_traffic(self, piece: Piece, group: Group, share: int, step: Sent, row: Sent) -> None:
        others = len(group.workers) - (self.owner in group)
        if not piece.is_sparse:
            gathers = 2 if self.gathered_with else 1
            step.add(group, piece.byte_size, self.owner, gathers * self.value_bytes(piece) * others)
        elif self.local_proxy:
            step.add(group, 0, self.owner, self.value_bytes(piece) * others)
            row.add(group, share * (piece.row_bytes + INDEX_BYTES), self.owner)
        else:
            row.add(group, share * (piece.row_bytes + 2 * INDEX_BYTES), self.owner, share * piece.row_bytes * others)

    def targets(self, worker: int, group: Group) -> list[int]:
        return [other for other in group.workers if other != self.owner] if worker == self.owner else [self.owner]
