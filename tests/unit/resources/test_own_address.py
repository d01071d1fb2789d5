"""The nodes that are this machine, and the addresses of the others."""

from __future__ import annotations

import socket

import pytest

from autodist.resources import ResourceSpec, SSHGroup, is_own_address

FOREIGN = "192.0.2.1"  # kept for documentation (RFC 5737), so no machine has it; binding to it sends nothing


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.0.0.2", socket.gethostname()])
def test_own_addresses_are_known(address: str) -> None:
    assert is_own_address(address)


@pytest.mark.parametrize("address", [FOREIGN, "2001:db8::1", "x" * 64])
def test_foreign_addresses_are_known(address: str) -> None:
    assert not is_own_address(address)


def test_a_name_that_cannot_be_found_is_not_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(*_args: object, **_keywords: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", not_found)
    assert not is_own_address("node7")


def test_parsing_looks_up_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_keywords: object) -> None:
        raise AssertionError("a name was looked up")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "socket", refuse)
    spec = ResourceSpec.from_dict({"nodes": [{"address": "a.example", "chief": True}, {"address": "b.example"}]})
    assert len(spec.replicas) == 2


def spec_with(other: dict[str, object], chief: dict[str, object] | None = None) -> ResourceSpec:
    first = {"address": "127.0.0.1", "chief": True, **(chief or {})}
    return ResourceSpec.from_dict({"nodes": [first, other], "ssh": {"lab": {"port": 2222}}})


def test_a_node_with_an_ssh_group_is_reached_by_ssh_even_at_an_own_address() -> None:
    spec = spec_with({"address": "127.0.0.2", "ssh_config": "lab"})
    assert not spec.nodes[1].is_local
    assert spec.ssh_group(spec.nodes[1]) == SSHGroup(port=2222)


def test_a_node_without_an_ssh_group_at_an_own_address_is_local() -> None:
    spec = spec_with({"address": "127.0.0.2"})
    assert spec.nodes[1].is_local
    assert spec.ssh_group(spec.nodes[1]) is None


def test_a_node_without_an_ssh_group_elsewhere_gets_the_defaults() -> None:
    spec = spec_with({"address": FOREIGN})
    assert not spec.nodes[1].is_local
    assert spec.ssh_group(spec.nodes[1]) == SSHGroup()


def test_the_chiefs_node_is_local_whatever_it_says() -> None:
    spec = spec_with({"address": FOREIGN}, chief={"address": "192.0.2.2", "ssh_config": "lab"})
    assert spec.chief.is_local
    assert spec.ssh_group(spec.chief) is None
