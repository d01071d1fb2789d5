from __future__ import annotations

import os
import socket

import pytest

from autodist.cluster import addresses, ports
from autodist.cluster.addresses import check_reach, host_and_port, is_loopback, split_host_and_port, unresolved
from autodist.cluster.ports import (
    is_open_to_others,
    leave_listening_to_this_process,
    listen,
    reserve_port,
    stop_listening,
)
from autodist.errors import ClusterError


def test_held_port_is_taken_for_others_and_free_after_release() -> None:
    held = reserve_port(None)
    assert 20000 <= held.port < 32000
    with pytest.raises(OSError, match=f"port {held.port} is taken by another process"):
        reserve_port(held.port)
    held.release()
    held.release()
    again = reserve_port(held.port)
    assert again.port == held.port
    again.release()


def test_copy_of_a_held_port_keeps_no_server_from_it_after_the_release() -> None:
    held = reserve_port(None)
    with socket.socket(fileno=os.dup(held.fileno())):  # as in a process that was forked before
        held.release()
        with socket.create_server(("", held.port)) as server:  # sets SO_REUSEADDR, as TensorFlow does
            socket.create_connection(("127.0.0.1", held.port)).close()
            server.accept()[0].close()


def test_forked_process_keeps_neither_a_held_port_nor_one_that_listens() -> None:
    held = reserve_port(None)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        leave_listening_to_this_process(server.getsockname()[1])
        descriptors = [held.fileno(), server.fileno(), other.fileno()]
        child = os.fork()
        if child == 0:
            os._exit(sum(1 << place for place, number in enumerate(descriptors) if _is_open(number)))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0b100
        assert [_is_open(number) for number in descriptors] == [True] * 3
    held.release()


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_held_port_accepts_no_connections() -> None:
    held = reserve_port(None)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", held.port), timeout=1)
    held.release()


def test_port_with_connections_of_a_moment_ago_can_be_asked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # the side that closes first keeps the port in TIME_WAIT
        client.close()
    held = reserve_port(port)
    assert held.port == port
    held.release()


def test_a_server_that_cannot_be_stopped_stops_listening() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        leave_listening_to_this_process(port)
        stop_listening()
        socket.create_server(("127.0.0.1", port)).close()
        assert os.readlink(f"/proc/self/fd/{server.fileno()}") == os.devnull, "no other file gets its number"


def test_port_of_a_listening_server_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} is taken by another process"):
            reserve_port(port)


@pytest.mark.parametrize(("host", "text"), [("h", "h:5"), ("localhost", "127.0.0.1:5"), ("fd00::1", "[fd00::1]:5")])
def test_host_and_port_as_tensorflow_takes_them(host: str, text: str) -> None:
    assert host_and_port(host, 5) == text
    assert split_host_and_port(text) == (text.rpartition(":")[0].strip("[]"), 5)


def test_loopback_addresses() -> None:
    assert [is_loopback(host) for host in ("localhost", "127.0.0.3", "::1")] == [True] * 3
    assert [is_loopback(host) for host in ("10.0.0.1", "gpu-1", "fd00::1")] == [False] * 3


def test_loopback_beside_a_real_address_is_refused() -> None:
    check_reach(["localhost", "127.0.0.2"])
    check_reach(["10.0.0.1", "gpu-1"])
    with pytest.raises(ClusterError, match=r"Node localhost: other machines \(10\.0\.0\.2\) cannot reach it"):
        check_reach(["localhost", "10.0.0.2"])


def test_a_process_that_was_forked_keeps_nothing_of_a_descriptor_that_is_no_server_s_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(ports, "_listening", {writing: 1})
    monkeypatch.setattr(ports, "_inherited", set())
    before = os.listdir("/proc/self/fd")
    ports._leave_to_parent()
    assert os.listdir("/proc/self/fd") == before
    os.close(reading)
    os.close(writing)


def test_names_are_tried_for_a_while_and_those_that_nobody_knows_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not "no server listens", minutes later, which a firewall would be looked at for."""
    asked: list[str] = []
    resolve = socket.getaddrinfo

    def getaddrinfo(host: str, *about: object, **more: object) -> object:
        asked.append(host)
        if host == "nobody" or (host == "booting" and asked.count(host) < 2):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [] if host == "booting" else resolve(host, None)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(addresses, "_RETRY_INTERVAL", 0.001)
    hosts = ("10.0.0.1", "fd00::1", "localhost", "booting", "nobody", "no..name")
    assert unresolved(hosts, limit=0.5) == {
        "nobody": "Name or service not known",
        "no..name": "it is not a valid host name",
    }
    assert asked.count("10.0.0.1") == 1 and asked.count("booting") == 2


@pytest.mark.parametrize(("host", "is_open"), [("127.0.0.1", False), ("0.0.0.0", True), ("", True), ("::1", False)])
def test_a_port_on_loopback_alone_is_not_open_to_others(host: str, is_open: bool) -> None:
    with listen(host, 0) as listening:
        port = listening.getsockname()[1]
        assert is_open_to_others(port) == is_open
    assert not is_open_to_others(port)
