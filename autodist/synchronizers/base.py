"""Synchronizer: how one variable, or one shard, is kept and its gradient combined."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from google.protobuf.message import Message

from autodist.graph.placement import VariablePlacement
from autodist.synchronizers.traffic import Piece, Sent


@dataclass(frozen=True)
class Synchronizer(ABC):
    """Base of the kinds; the fields are what the strategy says of it."""

    field: ClassVar[str]
    """Of the messages that have a synchronizer, the one that holds this kind."""

    message: ClassVar[type[Message]]
    """That type of message."""

    @classmethod
    @abstractmethod
    def from_message(cls, message: Any) -> Synchronizer:
        """What a message of this kind says.

        Raises:
            OptionError: it says what no synchronizer of this kind can be; the problem goes on after a variable's name.
        """

    @abstractmethod
    def to_message(self) -> Message:
        """What a strategy says of it."""

    # -- who holds the variable

    @property
    def variable_placement(self) -> VariablePlacement | None:
        """How one worker keeps the variable for all; None: every worker has it."""
        return None

    @property
    def has_proxy(self) -> bool:
        """Whether every worker keeps a copy of what its keeper has, which its replicas read."""
        return False

    @property
    def owner(self) -> int | None:
        """Index of the worker that alone holds the variable; None: every worker does."""
        return None

    # -- what is refused

    def misfit(self, piece: Piece) -> str | None:
        """Why it is not for the gradient of a variable, with the mend; None if it is."""
        return None

    @property
    def inexact(self) -> str | None:
        """Why the training is not that of one device, after a variable's name; None if it is."""
        return None

    # -- how it is told and counted

    @property
    @abstractmethod
    def way(self) -> str:
        """How the gradient crosses workers, in a word; two of them may not suit each other."""

    @property
    def goes_by_teams(self) -> bool:
        """Whether teams of workers, where there are any, add it up first or pass it on."""
        return False

    @property
    def goes_to_all(self) -> bool:
        """Whether each worker's part of a dense gradient goes to all others, since it cannot be added up on its way."""
        return False

    @property
    @abstractmethod
    def text(self) -> str:
        """For people, but for the group."""

    @property
    def group(self) -> int | None:
        """Gradients of equal group are combined together; None: each is by itself."""
        return None

    def without_group(self) -> Synchronizer:
        """The same, whatever else it is combined with."""
        return self

    @abstractmethod
    def add_traffic(self, piece: Piece, share: int, step: Sent, row: Sent) -> None:
        """Adds what each worker sends for one piece.

        Args:
            piece: what is synchronised.
            share: how many of the parts of a row of the whole variable (see `Sent`) lie in the piece.
            step: bytes of a step, however many rows it touches.
            row: bytes of one row that every worker touches, besides.
        """

    @abstractmethod
    def targets(self, worker: int, computing: Sequence[int]) -> list[int]:
        """The workers to which one sends, equally much to each.

        Args:
            worker: the one that sends.
            computing: those that have replicas, in their order.
        """
