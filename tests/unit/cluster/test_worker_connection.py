"""A worker connection's reactions to the messages of its worker's agent."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autodist.cluster.protocol import Exited, Leaving, Line, Lost, encode
from autodist.cluster.worker_connection import WorkerConnection, WorkerGroup
from autodist.resources import ResourceSpec

STARTS = (
    "I0000 00:00:1795321859.568474   23362 cudart_stub.cc:31] Could not find cuda drivers on your machine, "
    "GPU will not be used."
)


class Shown:
    """In place of the chief's outputs."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, stream: str, name: str, text: str) -> None:
        self.lines.append(text)


def _read(*lines: str) -> tuple[WorkerConnection, Shown]:
    said = [encode(Line("stderr", text)) for text in lines]
    channel: Any = SimpleNamespace(stdin=io.BytesIO(), stdout=[*said, encode(Exited(1))], stderr=[])
    shown, changed, ended = Shown(), threading.Condition(), threading.Event()
    link = WorkerConnection("worker", channel, changed, shown, lambda _: ended.set(), lambda _: None)  # type: ignore[arg-type]
    assert ended.wait(10)
    return link, shown


def test_what_tensorflow_says_in_every_run_is_neither_shown_nor_kept() -> None:
    link, shown = _read(STARTS, "ValueError: no", STARTS)
    assert shown.lines == ["ValueError: no"]
    assert link.last_lines == ("ValueError: no",)


def test_it_is_shown_to_who_debugs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "autodist"):
        _, shown = _read(STARTS)
    assert shown.lines == [STARTS]


def test_what_tensorflow_logs_is_shown_and_not_among_the_last_lines() -> None:
    said = "I0000 00:00:1795321859.568093   23362 service.cc:153] something new"
    link, shown = _read("ValueError: no", said)
    assert shown.lines == ["ValueError: no", said]
    assert link.last_lines == ("ValueError: no",)


def test_that_a_worker_leaves_is_reported_once() -> None:
    channel: Any = SimpleNamespace(
        stdin=io.BytesIO(), stdout=[encode(one) for one in (Leaving(), Leaving(), Exited(0))], stderr=[]
    )
    reported: list[str] = []
    ended = threading.Event()
    link = WorkerConnection("worker", channel, threading.Condition(), Shown(), lambda _: ended.set(), reported.append)  # type: ignore[arg-type]
    assert ended.wait(10)
    assert link.is_leaving and reported == ["worker"]


@pytest.mark.parametrize("is_elastic", [True, False])
def test_a_process_that_has_left_is_away_and_one_of_an_elastic_run_that_is_there_is_not(is_elastic: bool) -> None:
    spec = ResourceSpec.from_dict(
        {"nodes": "given", "reach_timeout": 0.1}
        | ({"min_nodes": 1, "checkpoint": {"folder": "saved", "every_steps": 9}} if is_elastic else {})
    ).with_nodes([{"address": "localhost", "cpus": [0, 1, 2, 3], "workers": 4, "chief": True}], [])
    changed, waiting = threading.Condition(), threading.Event()

    def stay() -> Iterator[bytes]:
        waiting.wait(60)
        yield from ()

    group = WorkerGroup(spec, changed, lambda _: None, lambda _: None, logs=False)  # type: ignore[arg-type]
    outputs = {"has left": [], "refuses": [encode(Lost("the agent does not understand"))], "is there": stay()}
    group.connections = tuple(
        WorkerConnection(name, channel, changed, Shown(), lambda _: None, lambda _: None, shows=False)  # type: ignore[arg-type]
        for name, channel in (
            (name, cast(Any, SimpleNamespace(stdin=io.BytesIO(), stdout=stdout, stderr=[])))
            for name, stdout in outputs.items()
        )
    )
    for connection in group.connections[:2]:
        connection._reader.join(10)
    answers = group.wait_for_facts(lambda: False)
    waiting.set()
    away = {name: answer.is_away for name, answer in answers.items() if isinstance(answer, Lost)}
    assert away == {"has left": True, "refuses": False, "is there": not is_elastic}
