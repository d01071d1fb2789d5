"""Files that grow while they are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from autodist.cli.metrics.follow import GrowingFile


def append(path: Path, text: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)


def test_each_whole_line_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = GrowingFile(path)
    assert file.read() == ()
    append(path, "a\nb")
    assert file.read() == ("a",)
    assert file.read() == ()
    append(path, "c\nd\n")
    assert file.read() == ("bc", "d")


def test_of_a_long_file_the_last_whole_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    append(path, "first\nsecond\nthird\n")
    file = GrowingFile(path, most_bytes=10)
    assert file.read() == ("third",)
    append(path, "fourth\n")
    assert file.read() == ("fourth",)


def test_a_file_that_was_replaced_is_read_from_its_begin(tmp_path: Path) -> None:
    path = tmp_path / "file"
    append(path, "first\nsecond\n")
    file = GrowingFile(path)
    file.read()
    path.write_text("new\n")
    assert file.read() == ("new",)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="directory"):
        GrowingFile(tmp_path).read()
