from __future__ import annotations

import hashlib
import io
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from queue import SimpleQueue

import pytest

from autodist.cluster import preemption_notice
from autodist.cluster.agent import Agent, find_facts
from autodist.cluster.protocol import Inspect, Leaving, Lost, Message, decode, encode
from autodist.versions import VERSION


def test_a_message_of_another_version_is_reported_with_this_one() -> None:
    outgoing = io.BytesIO()
    Agent(io.BytesIO(b'{"kind":"Teleport","where":"b"}\n'), outgoing, stop_timeout=1.0).serve()
    (said,) = map(decode, outgoing.getvalue().splitlines())
    assert isinstance(said, Lost)
    assert said.problem.startswith(f"the agent of AutoDist {VERSION} there does not understand the chief's")
    assert said.problem.endswith("install the chief's version there")


def test_a_message_of_which_the_login_has_read_a_part_is_reported_so() -> None:
    outgoing = io.BytesIO()
    Agent(io.BytesIO(b'":"Heartbeat"}\n'), outgoing, stop_timeout=1.0).serve()
    (said,) = map(decode, outgoing.getvalue().splitlines())
    assert isinstance(said, Lost)
    assert "the login there runs" in said.problem and "reads standard input" in said.problem


def test_text_without_a_line_ending_that_the_login_prints_first_hides_no_message() -> None:
    login = f"printf 'hello: '; exec {shlex.quote(sys.executable)} -P -m autodist.cluster.agent"
    greeting, message = subprocess.check_output(["/bin/sh", "-c", login], input=b"?\n").splitlines()
    assert greeting == b"hello: " and isinstance(decode(message), Lost)


def test_an_agent_reports_its_version() -> None:
    facts, held = find_facts(Inspect(None, "/", None))
    assert facts.autodist == VERSION
    assert held is not None
    held.release()


def test_an_agent_reports_versions_of_packages_and_the_content_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(b"print()\n")
    facts, held = find_facts(Inspect(str(script), str(tmp_path), None, ("keras", "no-such-package")))
    assert held is not None
    held.release()
    assert facts.packages == {"keras": metadata.version("keras")}
    assert facts.digest == hashlib.sha256(b"print()\n").hexdigest()
    assert decode(encode(facts)) == facts


def test_repeats_of_sigterm_are_reported_once_and_a_later_one_ends_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: SimpleQueue[Message] = SimpleQueue()
    agent = Agent(io.BytesIO(), io.BytesIO(), stop_timeout=1.0)
    monkeypatch.setattr(agent, "send", sent.put)
    assert not agent.leave()  # the chief does not save then
    agent._on_preempt = True
    assert agent.leave() and agent.leave()
    assert sent.get(timeout=10) == Leaving()
    monkeypatch.setattr(preemption_notice, "REPEATS_WITHIN", 0.0)
    assert not agent.leave()
    assert sent.empty()
