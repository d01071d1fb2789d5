"""Tables of plain text for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.table import Table
from rich.text import Text

NARROW = 120
"""Below this terminal width, the cells of a variable are stacked."""


def text_table(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Collection[str] = (),
    caption: str = "",
    has_lines: bool = False,
) -> Table:
    """Returns a table of plain text, since names may contain the square brackets of rich's markup.

    In a narrow terminal, long cells are wrapped.

    Args:
        title: the title; "": none.
        heads: the heads of the columns.
        rows: the cells of each row.
        numbers: the heads of the columns that are aligned to the right.
        caption: the text below the table; "": none.
        has_lines: True to draw a line between rows.
    """
    table = Table(title=Text(title) if title else None, title_justify="left", show_lines=has_lines)
    table.caption = Text(caption) if caption else None
    for head in heads:
        table.add_column(Text(head), justify="right" if head in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
