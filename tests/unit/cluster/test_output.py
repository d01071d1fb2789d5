from __future__ import annotations

import io
import os
import sys

import pytest

from autodist.cluster.output import Output

LIMIT = 10.0


def _show(output: Output, stream: str, name: str, text: str) -> None:
    output.line(stream, name, text)
    assert output.drain(LIMIT)


def test_line_goes_to_the_descriptor_past_a_line_that_is_being_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w", buffering=1) as stream, os.fdopen(reading, "rb") as received:
        monkeypatch.setattr(sys, "stdout", stream)
        stream.write("half a ")
        _show(Output(), "stdout", "host:1", "whole \N{BULLET}")
        stream.write("line\n")
        stream.close()
        assert received.read().decode() == "[host:1] whole \N{BULLET}\nhalf a line\n"


def test_under_pythonunbuffered_a_line_is_not_torn_either(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with io.TextIOWrapper(io.FileIO(writing, "w"), write_through=True) as stream, os.fdopen(reading, "rb") as received:
        monkeypatch.setattr(sys, "stdout", stream)
        output = Output()
        print("half", end=" ")
        _show(output, "stdout", "a", "whole")
        print("a line")
        _show(output, "stdout", "a", "last")
        stream.close()
        assert received.read().decode() == "[a] whole\nhalf a line\n[a] last\n"


def test_stand_in_without_a_descriptor_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stand_in)
    _show(Output(), "stderr", "a", "text")
    assert stand_in.getvalue() == "[a] text\n"


def test_nobody_to_read_it_is_no_error_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    output = Output()
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        _show(output, "stdout", "a", "text")
        _show(output, "stdout", "a", "more")
        monkeypatch.setattr(sys, "stdout", None)
        _show(output, "stdout", "a", "text")
    said = "the chief's stdout takes no more ([Errno 32] Broken pipe): lines of the other workers are lost"
    assert caplog.messages == [said]


def test_line_that_finds_the_disk_full_does_not_end_those_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    output = Output()
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        _show(output, "stdout", "a", "lost")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    _show(output, "stdout", "a", "room again")
    assert sys.stdout.getvalue() == "[a] room again\n"


def test_who_hands_over_lines_does_not_wait_while_nobody_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a terminal is halted, or `less` shows the first page."""
    reading, writing = os.pipe()
    output, text = Output(), "x" * 1000
    with os.fdopen(writing, "w") as stream, os.fdopen(reading, "rb") as received:
        monkeypatch.setattr(sys, "stdout", stream)
        for _ in range(200):  # more than a pipe holds
            output.line("stdout", "a", text)
        assert not output.drain(0.1)
        assert received.read(200 * len(f"[a] {text}\n")) == f"[a] {text}\n".encode() * 200
        assert output.drain(LIMIT)


def test_what_came_when_too_many_lines_waited_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr("autodist.cluster.output.MAX_WAITING", 100)
    output, text = Output(), "x" * 1000
    with os.fdopen(writing, "w") as stream, os.fdopen(reading, "rb") as received:
        monkeypatch.setattr(sys, "stdout", stream)
        for _ in range(300):
            output.line("stdout", "a", text)
        assert not output.drain(0.1)
        monkeypatch.setattr(sys, "stdout", None)  # nothing that follows is written, and the pipe takes the one that is
        received.read(len(f"[a] {text}\n"))
        assert output.drain(LIMIT)
    (said,) = caplog.messages
    assert said.endswith("lines of other workers were left out here: the output was blocked")
