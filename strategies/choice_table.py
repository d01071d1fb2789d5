"""The choice of `Auto` as text: the plans that were compared, the parts of the predicted time, and the reasons."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from autodist.logs.formatting import counted, readable_bytes, some_of
from autodist.logs.tables import text_table
from autodist.proto import strategy_pb2
from autodist.strategies.sum_summary import milliseconds

CHOICE_HEADS = ("plan", "predicted step", "a worker sends", "a worker holds")
REASON_HEADS = ("reason", "variables")

_NAMES = 3
"""Number of names in a cell; the others are counted."""


@dataclass(frozen=True)
class ChoiceFigures:
    """The figures of a choice.

    Attributes:
        rows: a row under `CHOICE_HEADS` for each plan, the chosen one first.
        caption: the parts of the chosen plan's time, and the origin of the times.
        reasons: the reason for each variable, by its name.
    """

    rows: tuple[tuple[str, ...], ...]
    caption: str
    reasons: dict[str, str]

    @classmethod
    def of(cls, choice: strategy_pb2.Choice) -> ChoiceFigures:
        """Returns the figures of a strategy's choice."""
        rows = tuple(_row(one) for one in choice.alternatives)
        parts = ", ".join(f"{term.name} {milliseconds(term.seconds)}" for term in choice.terms if term.seconds > 0)
        more = choice.compared - len(rows)
        others = f"; {counted(more, 'other plan')} not shown" if more > 0 else ""
        caption = f"{parts or 'no time predicted'}; {choice.basis}{others}"
        return cls(rows, caption, {reason.variable: reason.text for reason in choice.reasons})

    @property
    def title(self) -> str:
        """The chosen plan, in a sentence without a full stop."""
        return f"Auto chooses {self.rows[0][0]}"

    def table(self) -> Table:
        """Returns the table of the plans."""
        return text_table(self.title, CHOICE_HEADS, self.rows, numbers=CHOICE_HEADS[1:], caption=self.caption)

    @property
    def reason_rows(self) -> list[tuple[str, str]]:
        """Rows under `REASON_HEADS`: each reason, with the variables that it is for."""
        names: dict[str, list[str]] = {}
        for name, reason in self.reasons.items():
            names.setdefault(reason, []).append(name)
        return [(reason, some_of(of_reason, _NAMES)) for reason, of_reason in names.items()]


def _row(one: strategy_pb2.Alternative) -> tuple[str, ...]:
    held = f"{readable_bytes(one.held)}{' (too much)' if one.exceeds_memory else ''}"
    return one.name, milliseconds(one.seconds), readable_bytes(one.sent), held
