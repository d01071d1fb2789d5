"""The addresses of the servers as each worker reaches them, and the ports that stay open."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from autodist.cluster import forwards, server_network
from autodist.cluster.firewall import NOT_PERMITTED
from autodist.cluster.protocol import Facts, Lost
from autodist.cluster.server_network import ServerNetwork
from autodist.cluster.ssh_settings import ForwardOrder
from autodist.errors import ClusterError, MachinesAwayError
from autodist.resources import ResourceSpec, Worker
from autodist.waits import Condition

NODES = [
    {"address": "10.0.0.1", "chief": True, "cpus": [0, 1], "workers": 2},
    {"address": "10.0.0.2", "cpus": [0, 1], "workers": 2, "ssh_config": "lab"},
    {"address": "10.0.0.3", "ssh_config": "lab"},
]
PORTS = (15000, 15001, 16000, 16001, 17000)


def network_of(**keys: Any) -> tuple[ServerNetwork, list[tuple[str, str]]]:
    lost: list[tuple[str, str]] = []
    spec = ResourceSpec.from_dict({"nodes": NODES, "ssh": {"lab": {}}, **keys})
    return ServerNetwork(spec, Condition(), lambda worker, reason: lost.append((worker, reason))), lost


def facts_of(**about: Any) -> list[Facts]:
    return [Facts("3.11.7", "2.21.0", port, **about) for port in PORTS]


def open_network(network: ServerNetwork, facts: list[Facts] | None = None) -> None:
    network.open(facts or facts_of(), None, lambda: False)


class FakeConnection:
    """In place of a relay: each port of the machine that leads elsewhere is 100 times the port to which it leads."""

    lost: Lost | None = None
    made: dict[str, FakeConnection]

    def __init__(
        self, worker: Worker, order: ForwardOrder, environment: object, changed: Condition, on_lost: Callable[..., None]
    ) -> None:
        self.first_worker, self.order, self.on_lost = worker, order, on_lost
        self.ports = None if self.lost else tuple(100 * port for port in order.from_machine)
        self.made[worker.node.address] = self
        self.is_closed = False

    def end_input(self) -> None:
        self.is_closed = True

    def wait(self, seconds: float) -> bool:
        return self.is_closed

    def close(self) -> None: ...


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeConnection]:
    monkeypatch.setattr(forwards, "ForwardConnection", FakeConnection)
    monkeypatch.setattr(FakeConnection, "made", {}, raising=False)
    return FakeConnection.made


def test_without_encryption_all_workers_use_the_addresses_of_the_machines() -> None:
    network, _ = network_of()
    open_network(network)
    assert network.addresses_for(0) == network.addresses_for(4)
    own, second = ["10.0.0.1:15000", "10.0.0.1:15001"], ["10.0.0.2:16000", "10.0.0.2:16001"]
    assert [*network.addresses_for(4)] == [*own, *second, "10.0.0.3:17000"]


def test_with_encryption_each_machine_uses_its_own_ports_and_forwards(made: dict[str, FakeConnection]) -> None:
    network, _ = network_of(encrypt="ssh")
    open_network(network)
    second, third = made["10.0.0.2"].order, made["10.0.0.3"].order
    to = dict(port[::-1] for port in (*second.to_machine, *third.to_machine))  # by the real port: the chief's way there
    assert set(to) == {16000, 16001, 17000}
    assert second.from_machine == (15000, 15001, to[17000])
    assert third.from_machine == (15000, 15001, to[16000], to[16001])

    def ports(worker: int) -> list[int]:
        host_ports = [address.partition(":") for address in network.addresses_for(worker)]
        assert {host for host, _, _ in host_ports} == {"127.0.0.1"}
        return [int(port) for _, _, port in host_ports]

    assert ports(0) == ports(1) == [15000, 15001, to[16000], to[16001], to[17000]]
    assert ports(2) == ports(3) == [1500000, 1500100, 16000, 16001, 100 * to[17000]]
    assert ports(4) == [1500000, 1500100, 100 * to[16000], 100 * to[16001], 17000]
    assert network.forwarded_to(1) == ()
    assert network.forwarded_to(3) == (1500000, 1500100, 100 * to[17000])
    network.close()
    assert all(connection.is_closed for connection in made.values())


def test_a_machine_without_forwards_is_named(made: dict[str, FakeConnection], monkeypatch: pytest.MonkeyPatch) -> None:
    for is_away, error in ((False, ClusterError), (True, MachinesAwayError)):
        monkeypatch.setattr(FakeConnection, "lost", Lost("no forwards", is_away))
        network, _ = network_of(encrypt="ssh")
        with pytest.raises(error, match=r"cannot start:\n  10.0.0.2:0 +no forwards\n  10.0.0.3 +no forwards$"):
            open_network(network)
        assert all(connection.is_closed for connection in made.values())


def test_the_end_of_forwards_is_the_loss_of_their_machine(made: dict[str, FakeConnection]) -> None:
    network, lost = network_of(encrypt="ssh")
    open_network(network)
    made["10.0.0.3"].lost = Lost("the SSH connection broke")
    made["10.0.0.3"].on_lost(made["10.0.0.3"])
    assert lost == [("10.0.0.3", "was lost: the SSH connection broke")]
    network.close()


def test_a_firewall_admits_the_addresses_of_all_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    monkeypatch.setattr(server_network, "Firewall", lambda port, admitted: opened.append((port, admitted)))
    network, _ = network_of(firewall="auto")
    open_network(network, facts_of(interfaces=("10.0.0.2", "192.168.0.2", "fd00::2")))
    admitted = ("10.0.0.1", "10.0.0.2", "10.0.0.3", "192.168.0.2", "fd00::2")
    assert opened == [(15000, admitted)]
    assert network.admitted_to(4) == admitted
    network.warn_of_open_ports()


def test_with_encryption_a_firewall_admits_nobody(
    monkeypatch: pytest.MonkeyPatch, made: dict[str, FakeConnection]
) -> None:
    monkeypatch.setattr(server_network, "Firewall", lambda port, admitted: None)
    network, _ = network_of(firewall="auto", encrypt="ssh")
    open_network(network)
    assert network.admitted_to(3) == ()
    network.close()


def test_open_ports_are_logged_with_what_to_run(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "autodist")
    network, _ = network_of()
    open_network(network)
    assert network.admitted_to(2) is None
    network.warn_of_open_ports()
    assert "ports of 10.0.0.1:15000, 10.0.0.1:15001, 10.0.0.2:16000" in caplog.text
    assert "with root, `firewall: auto` in the YAML sets one" in caplog.text
    caplog.clear()
    network, _ = network_of(firewall="auto")
    facts = [Facts("3.11.7", "2.21.0", port, no_firewall=NOT_PERMITTED) for port in PORTS]
    open_network(network, facts)
    network.warn_of_open_ports()
    rule = 'iifname != "lo" tcp dport 17000 ip saddr != { 10.0.0.1, 10.0.0.2, 10.0.0.3 } drop'
    assert f"has set no firewall there: {NOT_PERMITTED}. Set `port` for the nodes" in caplog.text
    assert f"  10.0.0.3: nft add rule inet filter input {rule}\n" in caplog.text


def test_workers_of_one_machine_are_worth_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    spec = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]})
    network = ServerNetwork(spec, Condition(), lambda worker, reason: None)
    open_network(network, facts_of()[:2])
    network.warn_of_open_ports()
    assert not caplog.records
