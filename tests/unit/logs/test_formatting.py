"""Numbers in messages and tables."""

from __future__ import annotations

import pytest

from autodist.logs.formatting import counted, readable_bytes, readable_flops


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (9_996_000, "10.0 MB"),
        (40_000_000, "40.0 MB"),
        (123_000_000_000, "123 GB"),
        (5 * 10**15, "5000 TB"),
    ],
)
def test_bytes_are_readable(count: int, text: str) -> None:
    assert readable_bytes(count) == text


@pytest.mark.parametrize(
    "count, text",
    [(None, "not known"), (0, "0"), (999, "999"), (1000, "1.00 k"), (1_234_567, "1.23 M"), (5 * 10**18, "5000 P")],
)
def test_flops_are_readable(count: int | None, text: str) -> None:
    assert readable_flops(count) == text


@pytest.mark.parametrize(
    "number, thing, text",
    [
        (0, "row", "0 rows"),
        (1, "row", "1 row"),
        (2, "row", "2 rows"),
        (1, "batch", "1 batch"),
        (3, "batch", "3 batches"),
    ],
)
def test_things_are_counted(number: int, thing: str, text: str) -> None:
    assert counted(number, thing) == text
