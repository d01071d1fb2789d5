"""Synchronizer: placement of one variable or shard and reduction of its gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from google.protobuf.message import Message

from autodist.placement.group import Group
from autodist.placement.synchrony import Synchrony
from autodist.synchronizers.traffic import Piece, Sent


@dataclass(frozen=True)
class Synchronizer(ABC):
    """Base of the kinds; its fields are those of the strategy message."""

    message: ClassVar[type[Message]]
    """The type of its message, in a field of a strategy's node or shard."""

    compressor_option: ClassVar[str] = "compressor"
    """The option that `misfit` is about."""

    @classmethod
    @abstractmethod
    def from_message(cls, message: Any) -> Synchronizer:
        """Returns the synchronizer of a message of this kind.

        Raises:
            OptionError: the message is not valid; the problem is the end of a sentence that starts with a variable's
                name.
        """

    @abstractmethod
    def to_message(self) -> Message:
        """Returns its message in a strategy."""

    # -- placement

    @property
    def synchrony(self) -> Synchrony | None:
        """Synchronization of a variable that one worker owns, or of which each worker updates its own copy; None:
        every worker holds it and makes the same updates."""
        return None

    @property
    def has_cached_copy(self) -> bool:
        """True if every worker holds a cached copy of the owner's value, which its replicas read."""
        return False

    @property
    def value_encoding(self) -> str:
        """The compressor of the values that refresh cached copies (`Compressor.encoding`); "": they are exact."""
        return ""

    @property
    def gathered_with(self) -> int:
        """The layer with which the value is gathered twice a step, from 1; 0: it is not gathered."""
        return 0

    @property
    def owner(self) -> int | None:
        """Index of the only worker that holds the variable; None: every worker does."""
        return None

    # -- checks

    def misfit(self, piece: Piece) -> str | None:
        """Returns why it does not suit the gradient of a variable, and the fix; None if it does."""
        return None

    @property
    def inexact(self) -> str | None:
        """Why training differs from that of one device, to follow a variable's name; None if it does not."""
        return None

    # -- description and cost

    @property
    @abstractmethod
    def way(self) -> str:
        """The algorithm that reduces the gradient across workers, in one word; two algorithms may be incompatible."""

    @property
    def uses_subgroups(self) -> bool:
        """True if it is summed within, or passed through, subgroups of workers if there are any."""
        return False

    @property
    def goes_to_all(self) -> bool:
        """True if each worker's dense gradient goes to all others, because it cannot be summed on its way."""
        return False

    @property
    @abstractmethod
    def text(self) -> str:
        """Description for people, without the group."""

    @property
    def group(self) -> int | None:
        """Gradients of equal group are reduced together; None: each is reduced separately."""
        return None

    def without_group(self) -> Synchronizer:
        """Returns the same synchronizer without its group."""
        return self

    @abstractmethod
    def add_traffic(self, piece: Piece, group: Group, share: int, step: Sent, row: Sent) -> None:
        """Adds the bytes that each worker sends for one piece.

        Args:
            piece: the variable or shard.
            group: the replicas.
            share: number of units of a row of the complete variable (`parts` of `Sent`) that lie in the piece.
            step: bytes of a step, whatever the number of rows that it touches.
            row: additional bytes for one row that every worker touches.
        """

    @abstractmethod
    def targets(self, worker: int, group: Group) -> list[int]:
        """Returns the workers to which one sends, equally much to each.

        Args:
            worker: the sender.
            group: the replicas.
        """
