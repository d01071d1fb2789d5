"""The probes of all machines: each is reported, regardless of the others."""

from __future__ import annotations

import socket
import time

import pytest

from autodist.cli.checking import check_machines
from autodist.cli.checking.check_machines import CheckedMachine, check_all_machines
from autodist.cli.checking.messages import TimeAnswer
from autodist.cli.checking.probe import Probe
from autodist.cluster.protocol import Lost, decode, encode
from autodist.resources import Node, ResourceSpec
from tests.unit.cli.checking.fakes import FakeTransport, probing


def look(monkeypatch: pytest.MonkeyPatch, **machines: FakeTransport) -> dict[str, CheckedMachine]:
    """Returns the probe results of machines, by name; the first is the chief's."""
    nodes = [{"address": name, "chief": name == next(iter(machines))} for name in machines]
    spec = ResourceSpec.from_dict({"nodes": nodes, "reach_timeout": 2, "connect_timeout": 1})

    def open_channels(spec: ResourceSpec, node: Node, count: int, *command: str, retry_limit: float) -> object:
        return machines[node.address].open(count, *command)

    monkeypatch.setattr(check_machines, "open_channels", open_channels)
    return {found.name: found for found in check_all_machines(spec, None, None)}


def test_a_machine_that_cannot_be_reached_keeps_no_other_from_being_told(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = FakeTransport(lambda probe, line: encode(Lost("connection refused. Start an SSH server there")))
    found = look(monkeypatch, chief=FakeTransport(), gone=gone, fine=FakeTransport())
    assert found["gone"].problem == "connection refused. Start an SSH server there"
    assert found["gone"].machine is None
    for name in ("chief", "fine"):
        assert found[name].problem is None
        assert found[name].machine is not None
        assert found[name].machine.hardware.cores > 0
    assert gone.channel.is_closed


def test_a_greeting_is_passed_over_and_reported_where_nothing_else_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    greeted = FakeTransport(greeting=b"Welcome!\n\n")
    silent = FakeTransport(lambda probe, line: None, greeting=b"This account is not available.\n")
    without = FakeTransport(lambda probe, line: None, complaint=b"python: No module named autodist\n")
    found = look(monkeypatch, greeted=greeted, silent=silent, without=without)
    assert found["greeted"].problem is None
    assert "(This account is not available.)" in str(found["silent"].problem)
    assert "autodist is not installed for the Python there" in str(found["without"].problem)


def test_a_machine_that_says_nothing_is_reported_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(monkeypatch, chief=FakeTransport(), mute=FakeTransport(lambda probe, line: b""))
    assert str(found["mute"].problem).startswith("no answer within 3 s")
    assert "`reach_timeout`" in str(found["mute"].problem)
    assert found["chief"].problem is None


def test_a_clock_that_is_ahead_is_reported_with_its_uncertainty(monkeypatch: pytest.MonkeyPatch) -> None:
    def ahead(probe: Probe, line: bytes) -> bytes:
        line = probing(probe, line)
        return encode(TimeAnswer(time.time() + 5)) if isinstance(decode(line), TimeAnswer) else line

    clock = look(monkeypatch, chief=FakeTransport(), ahead=FakeTransport(ahead))["ahead"].clock
    assert clock is not None
    assert abs(clock.ahead - 5) <= clock.uncertainty
    assert clock.uncertainty < 1


def test_ports_that_are_taken_and_names_that_nobody_knows_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        spec = ResourceSpec.from_dict({"nodes": [{"address": "nosuch.invalid", "port": port - 1, "workers": 1}]})
        monkeypatch.setattr(
            check_machines, "open_channels", lambda spec, node, *how, **more: FakeTransport().open(*how)
        )
        node = spec.nodes[0].model_copy(update={"port": port})
        (found,) = check_all_machines(spec.model_copy(update={"nodes": (node,)}), None, None)
    assert found.machine is not None
    assert found.machine.ports == (None,)
    assert found.machine.facts.problems == (
        f"port {port} is taken by another process; free it, or choose another `port` for the node",
    )
    (other,) = check_all_machines(spec, None, None)
    (problem,) = other.unreachable.values()
    assert "the name nosuch.invalid cannot be resolved there" in problem
