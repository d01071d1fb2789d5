from __future__ import annotations

import io
import os
import sys

import pytest

from autodist.cluster.output import Output


def test_line_goes_to_the_descriptor_past_a_line_that_is_being_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w", buffering=1) as stream, os.fdopen(reading, "rb") as received:
        monkeypatch.setattr(sys, "stdout", stream)
        stream.write("half a ")
        Output().line("stdout", "host:1", "whole \N{BULLET}")
        stream.write("line\n")
        stream.close()
        assert received.read().decode() == "[host:1] whole \N{BULLET}\nhalf a line\n"


def test_stand_in_without_a_descriptor_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stand_in)
    Output().line("stderr", "a", "text")
    assert stand_in.getvalue() == "[a] text\n"


def test_nobody_to_read_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        Output().line("stdout", "a", "text")
        monkeypatch.setattr(sys, "stdout", None)
        Output().line("stdout", "a", "text")
