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


def test_nobody_to_read_it_is_no_error_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    output = Output()
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        output.line("stdout", "a", "text")
        output.line("stdout", "a", "more")
        monkeypatch.setattr(sys, "stdout", None)
        output.line("stdout", "a", "text")
    said = "the chief's stdout takes no more ([Errno 32] Broken pipe): lines of the other workers are lost"
    assert caplog.messages == [said]


def test_line_that_finds_the_disk_full_does_not_end_those_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    output = Output()
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        output.line("stdout", "a", "lost")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    output.line("stdout", "a", "room again")
    assert sys.stdout.getvalue() == "[a] room again\n"
