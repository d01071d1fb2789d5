"""The connection failures that may be temporary, and the duration of retries."""

from __future__ import annotations

import errno
import socket

import paramiko
import pytest
from paramiko.ssh_exception import NoValidConnectionsError

from autodist.cluster import ssh_machine, ssh_paramiko
from autodist.cluster.ssh_paramiko import ParamikoMachine
from autodist.cluster.ssh_settings import SSHSettings
from autodist.errors import ClusterError

REFUSED = NoValidConnectionsError({("10.0.0.2", 22): ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")})


class Machine:
    """Fails so often, and is there then; its clock runs while it is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cause: BaseException, failures: int) -> None:
        self.cause, self.failures, self.tries, self.now = cause, failures, 0, 100.0
        monkeypatch.setattr(ssh_paramiko, "connect", self.connect)
        monkeypatch.setattr(ssh_machine.time, "monotonic", lambda: self.now)

    def connect(self, settings: SSHSettings) -> str:
        self.tries += 1
        if self.tries <= self.failures:
            raise ClusterError("10.0.0.2 port 22: it failed.") from self.cause
        return "client"

    def wait_while_needed(self, seconds: float) -> bool:
        self.now += seconds
        return True

    def log_in(self, retry_limit: float) -> object:
        machine = ParamikoMachine(SSHSettings("10.0.0.2", retry_limit=retry_limit), self.wait_while_needed)
        return ssh_machine.retry_login(machine._log_in, retry_limit, self.wait_while_needed)


@pytest.mark.parametrize(
    "cause",
    [
        REFUSED,
        OSError(errno.EHOSTUNREACH, "No route to host"),
        TimeoutError("timed out"),
        paramiko.ChannelException(2, "Connect failed"),  # a jump host could not
        ConnectionResetError(errno.ECONNRESET, "reset"),
    ],
    ids=["refused", "no-route", "silent", "behind-a-jump-host", "hung-up"],
)
def test_a_machine_that_boots_is_tried_again_until_it_is_there(
    monkeypatch: pytest.MonkeyPatch, cause: BaseException
) -> None:
    machine = Machine(monkeypatch, cause, failures=12)
    assert machine.log_in(60) == "client"
    assert machine.tries == 13


@pytest.mark.parametrize(
    "cause",
    [
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        paramiko.AuthenticationException("refused"),
        paramiko.SSHException("host key"),
        None,
    ],
)
def test_what_no_waiting_helps_is_reported_at_once(
    monkeypatch: pytest.MonkeyPatch, cause: BaseException | None
) -> None:
    machine = Machine(monkeypatch, cause, failures=1)  # type: ignore[arg-type]
    with pytest.raises(ClusterError) as caught:
        machine.log_in(60)
    assert (machine.tries, str(caught.value)) == (1, "10.0.0.2 port 22: it failed.")


def test_a_machine_that_never_comes_is_reported_after_that_time(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, REFUSED, failures=10**6)
    with pytest.raises(ClusterError) as caught:
        machine.log_in(60)
    assert 55 < machine.now - 100 <= 60
    assert f"it failed. It was tried {machine.tries} times in" in str(caught.value)
    assert "if machines take longer to boot, raise `connect_timeout`." in str(caught.value)


def test_without_a_time_limit_it_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, REFUSED, failures=10**6)
    with pytest.raises(ClusterError, match=r"it failed\.\Z"):
        machine.log_in(0)
    assert machine.tries == 1


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            paramiko.ChannelException(2, "Connect failed"),
            r"\(ChannelException\(2, .*\)\); .*`MaxSessions`",
        ),
        (EOFError(), r"\(EOFError\); the login succeeded, and then the connection ended"),
    ],
    ids=["no-session", "hung-up"],
)
def test_a_login_that_starts_no_command_is_reported_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    class Client:
        def get_transport(self) -> Client:
            return self

        def open_session(self, timeout: float) -> None:
            raise error

    monkeypatch.setattr(ssh_paramiko, "connect", lambda settings: Client())
    machine = ParamikoMachine(SSHSettings("10.0.0.2"), lambda seconds: True)
    with pytest.raises(ClusterError, match=f"10.0.0.2: the SSH server starts no command {text}"):
        machine.start(["true"], b"")
