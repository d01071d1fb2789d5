from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any

import paramiko
import pytest
from paramiko.ssh_exception import NoValidConnectionsError

from autodist.cluster.ssh_errors import (
    ChangedHostKeyError,
    RevokedHostKeyError,
    UnknownHostKeyError,
    UnreachableError,
    has_hung_up,
    is_silent,
)
from autodist.cluster.ssh_keys import LoginRefusedError, MoreThanKeyError, UnusableKeyError
from autodist.cluster.ssh_paramiko import connect
from autodist.cluster.ssh_settings import SSHSettings
from autodist.errors import ClusterError

KEY = paramiko.ECDSAKey.generate()

CASES: list[tuple[Exception, list[str]]] = [
    (UnknownHostKeyError(KEY), ["host key is not known", KEY.fingerprint, "`ssh-keyscan -p 2222 10.9.9.9 >> /kh`"]),
    (
        ChangedHostKeyError(KEY),
        ["host key has changed", KEY.fingerprint, "`ssh-keygen -R '[10.9.9.9]:2222' -f /kh`", "ssh-keyscan -p 2222"],
    ),
    (RevokedHostKeyError(KEY), ["marked as revoked", KEY.fingerprint, "new host key"]),
    (UnknownHostKeyError(KEY, ("/kh:3",)), ["not known", "Lines that cannot be read: /kh:3"]),
    (LoginRefusedError([], []), ["no private key to log in with as user ann", "set `key_file`"]),
    (LoginRefusedError([], [UnusableKeyError("/k", "is empty")]), ["no private key to log in with", "/k is empty"]),
    (LoginRefusedError([], [UnusableKeyError("/k", "is locked", True)]), ["the private key /k is locked"]),
    (LoginRefusedError(["/k"], []), ["none of the keys offered for user ann"]),
    (MoreThanKeyError(["password"]), ["requires password in addition to a key of user ann", "AuthenticationMethods"]),
    (paramiko.AuthenticationException("no"), ["none of the keys", "user ann", "`ssh-copy-id -p 2222 ann@10.9.9.9`"]),
    (paramiko.AuthenticationException("Authentication timeout."), ["takes too long", "raise `connect_timeout`"]),
    (paramiko.BadAuthenticationType("no", ["password"]), ["none of the keys", "ssh-copy-id"]),
    (paramiko.ProxyCommandFailure("nc x", "broken"), ["ProxyCommand 'nc x' failed: broken", "ssh -p 2222"]),
    (paramiko.ChannelException(2, "Connect failed"), ["jump host", "Connect failed"]),
    (paramiko.SSHException("Error reading SSH protocol banner"), ["no SSH session was established", "SSH server?"]),
    (EOFError(), ["closed the connection"]),
    (TimeoutError("timed out"), ["no answer in time", "firewall", "raise `connect_timeout`"]),
    (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), ["cannot be resolved", "Correct the address"]),
    (OSError(errno.ECONNREFUSED, "Connection refused"), ["connection refused", "`port`"]),
    (OSError(errno.EHOSTUNREACH, "No route to host"), ["no route", "on the network"]),
    (OSError(errno.ENETUNREACH, "Network is unreachable"), ["no route"]),
    (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), ["reset by peer", "ssh -p 2222 ann@10.9.9.9"]),
    (NoValidConnectionsError({("10.9.9.9", 2222): OSError(errno.ECONNREFUSED, "x")}), ["connection refused", "`port`"]),
]  # fmt: skip

OF_SILENCE = {
    "takes too long",
    "jump host",
    "no answer in time",
    "cannot be resolved",
    "connection refused",
    "no route",
}
"""The messages on machines that do not answer; others refuse, or hang up."""


@pytest.mark.parametrize(("error", "words"), CASES, ids=lambda value: type(value).__name__)
def test_every_exception_names_host_cause_and_fix(
    error: Exception, words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(self: paramiko.SSHClient, *arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(paramiko.SSHClient, "connect", fail)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ClusterError) as caught:
        connect(SSHSettings("10.9.9.9", username="ann", port=2222, known_hosts="/kh"))
    text = str(caught.value)
    assert text.startswith("10.9.9.9 port 2222: ")
    assert [word for word in words if word not in text] == []
    assert caught.value.__cause__ is error
    assert isinstance(caught.value, UnreachableError) is not OF_SILENCE.isdisjoint(words)


def test_whoever_greets_too_late_is_silent_and_who_hangs_up_or_prohibits_is_not() -> None:
    late, hung_up = (paramiko.SSHException("Error reading SSH protocol banner") for _ in range(2))
    late.__context__, hung_up.__context__ = TimeoutError("timed out"), EOFError()
    assert is_silent(late) and not is_silent(hung_up)
    assert has_hung_up(hung_up) and not has_hung_up(late)
    assert not is_silent(paramiko.ChannelException(1, "Administratively prohibited"))


def test_name_of_the_yaml_stays_beside_the_address_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text("Host lab1\n  HostName 127.0.0.1\n  Port 1\n  User bob\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ClusterError, match=r"^lab1 \(127\.0\.0\.1 port 1\): connection refused"):
        connect(SSHSettings("lab1"))


def test_key_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = os.fspath(tmp_path / "key")
    with pytest.raises(ClusterError, match=r"the key file .*key cannot be read .No such file.*Correct `key_file`"):
        connect(SSHSettings("10.9.9.9", key_file=missing))
