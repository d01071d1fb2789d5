"""A file that several starts of a script append whole lines to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autodist.runs.metrics import line_file
from autodist.runs.metrics.line_file import LineFile


def append(path: Path, *lines: str) -> None:
    file = LineFile(path)
    for line in lines:
        file.add(line)
    file.close()


def test_later_starts_append(tmp_path: Path) -> None:
    append(tmp_path / "file", "a", "b")
    append(tmp_path / "file", "ü")
    assert (tmp_path / "file").read_text() == "a\nb\nü\n"


@pytest.mark.parametrize("begun", ["x", "x" * 100])
@pytest.mark.parametrize("before", ["", "a\nb\n"])
def test_a_line_that_a_killed_process_has_begun_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, begun: str
) -> None:
    monkeypatch.setattr(line_file, "_BLOCK", 8)
    (tmp_path / "file").write_text(before + begun)
    append(tmp_path / "file", "c")
    assert (tmp_path / "file").read_text() == before + "c\n"


def test_a_line_that_is_written_in_part_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LineFile(tmp_path / "file")
    monkeypatch.setattr(os, "write", lambda descriptor, content: len(content) - 1)
    with pytest.raises(OSError, match="only 2 of 3 bytes"):
        file.add("ab")
    file.close()


def test_a_file_that_was_removed_is_an_error(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "file")
    file.add("a")
    (tmp_path / "file").unlink()
    with pytest.raises(FileNotFoundError, match="file was removed"):
        file.add("b")
    file.close()
