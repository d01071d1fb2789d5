"""Command lines of the `ssh` program, parsed by OpenSSH itself (`ssh -G`), without a connection."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from autodist.cluster import ssh_program
from autodist.cluster.ssh_keys import read_key
from autodist.cluster.ssh_program import command_line, fastest_cipher, forwarding, joining, master, require_program
from autodist.cluster.ssh_program_machine import Connection, ProgramMachine
from autodist.cluster.ssh_program_output import why_no_login
from autodist.cluster.ssh_route import Hop
from autodist.cluster.ssh_route import find_route as find_route_with
from autodist.cluster.ssh_settings import SSHSettings
from autodist.cluster.transport import ssh_settings
from autodist.errors import ClusterError
from autodist.resources import ResourceSpec

needs_openssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="OpenSSH is not installed")


def find_route(settings: SSHSettings) -> list[Hop]:
    return find_route_with(settings, read_key)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """~/.ssh of a home directory that is not the one in passwd."""
    monkeypatch.setenv("HOME", str(tmp_path))
    made = tmp_path / ".ssh"
    made.mkdir()
    return made


def read_back(line: list[str], host: str) -> dict[str, str]:
    """Returns OpenSSH's options for a command line; for repeated options the last value."""
    done = subprocess.run([line[0], "-G", *line[1:], "--", host], capture_output=True, text=True, check=True)
    return dict(said.split(" ", 1) for said in done.stdout.splitlines() if " " in said)


@needs_openssh
def test_the_settings_are_options_and_go_before_the_users(folder: Path) -> None:
    (folder / "config").write_text(
        "Host *\n  BatchMode no\n  StrictHostKeyChecking no\n  RequestTTY force\n  LocalForward 8080 localhost:80\n"
        "  PermitLocalCommand yes\n  RemoteCommand sleep 9\n  ControlMaster auto\n  ControlPersist yes\n  Port 2200\n"
        "  ConnectTimeout 999\n  ServerAliveInterval 0\n  KexAlgorithms curve25519-sha256\n"
    )
    key = folder / "my 50% key"
    key.write_text("a key")
    settings = SSHSettings("lab", username="ann", port=2222, key_file=str(key), known_hosts="/my 50% hosts")
    line = command_line(find_route(settings), 25.0, 14.2, "/folder")
    made = read_back(master(line, "/folder/0", "lab")[:-2], "lab")
    expected = {
        "user": "ann", "port": "2222", "batchmode": "yes", "stricthostkeychecking": "true", "requesttty": "false",
        "clearallforwardings": "yes", "permitlocalcommand": "no", "controlmaster": "true", "controlpersist": "no",
        "connecttimeout": "15", "serveraliveinterval": "25", "serveralivecountmax": "3", "identitiesonly": "yes",
        "globalknownhostsfile": "/dev/null", "loglevel": "DEBUG", "kexalgorithms": "curve25519-sha256",
        "updatehostkeys": "false", "controlpath": "/folder/0", "sessiontype": "none",
    }  # fmt: skip
    assert {name: made.get(name) for name in expected} == expected
    assert "remotecommand" not in made
    assert made["identityfile"].replace("%%", "%") == str(key)
    assert made["userknownhostsfile"].replace("%%", "%") == "/my 50% hosts"
    joined = read_back(joining(line, "/folder/0"), "lab")
    assert (joined["proxycommand"], joined["controlmaster"], joined["controlpath"]) == ("false", "false", "/folder/0")


@needs_openssh
def test_unchecked_hosts_leave_nothing_in_known_hosts(folder: Path) -> None:
    made = read_back(command_line(find_route(SSHSettings("lab", host_key_checking=False)), 25, 15, "/folder"), "lab")
    files = {made["userknownhostsfile"], made["globalknownhostsfile"]}
    assert (made["stricthostkeychecking"], files) == ("false", {"/dev/null"})


@needs_openssh
def test_jump_hosts_are_reached_as_their_groups_say_each_with_a_log_of_its_own(folder: Path) -> None:
    (folder / "config").write_text("Host far\n  ProxyJump gate,mid:2200\n  HostName 10.0.0.9\nHost mid\n  User bob\n")
    settings = SSHSettings("far").through([SSHSettings("gate", username="eve", known_hosts="/a b%", port=99)])
    route = find_route(settings)
    assert [(hop.endpoint.host, hop.endpoint.port) for hop in route] == [("10.0.0.9", 22), ("mid", 2200), ("gate", 99)]
    words = command_line(route, 25, 15, "/my folder")
    (option,) = (word for word in words if word.startswith("ProxyCommand="))
    inner = shlex.split(option.removeprefix("ProxyCommand=").replace("%%", "%"))
    assert inner[inner.index("-W") + 1 :] == ["[10.0.0.9]:22", "--", "mid"]
    assert inner[inner.index("-E") + 1] == "/my folder/jump2.log"
    (option,) = (word for word in inner if word.startswith("ProxyCommand="))
    innermost = shlex.split(option.removeprefix("ProxyCommand=").replace("%%", "%"))
    assert innermost[innermost.index("-W") + 1 :] == ["[mid]:2200", "--", "gate"]
    assert 'UserKnownHostsFile="/a b%%"' in innermost and innermost[innermost.index("-l") + 1] == "eve"
    assert "ProxyCommand=" not in " ".join(innermost)


@needs_openssh
@pytest.mark.parametrize("end", ["kex_exchange_identification: Connection closed by remote host", "{}: Broken pipe"])
def test_a_proxy_command_that_has_ended_is_the_cause_however_early(folder: Path, end: str) -> None:
    (folder / "config").write_text("Host lab\n  ProxyCommand sh -c 'echo broken >&2; exit 3'\n")
    said = f"broken\n{end.format('banner exchange: Connection to UNKNOWN port 65535')}\n"
    error = why_no_login(find_route(SSHSettings("lab")), str(folder), said, 255)
    assert "the ProxyCommand \"sh -c 'echo broken >&2; exit 3'\" failed: broken. Try `ssh " in str(error)


def test_leaving_a_machine_lets_what_reads_its_programs_come_to_their_end() -> None:
    for _ in range(20):
        with ProgramMachine(SSHSettings("lab"), lambda seconds: True, 1.0) as logins:
            speaking = ["sh", "-c", "while :; do echo word >&2; done"]
            program = logins._child_processes.start(speaking, subprocess.DEVNULL, subprocess.DEVNULL, subprocess.PIPE)
            logins._logins.append(Connection(None, program))
        assert logins._logins[0].has_ended()


def test_a_way_in_a_circle_and_a_key_that_is_not_there_are_reported(folder: Path) -> None:
    (folder / "config").write_text("Host a\n  ProxyJump b\nHost b\n  ProxyJump lab\nHost lab\n  ProxyJump a\n")
    with pytest.raises(ClusterError, match="lab .*leads through itself"):
        find_route(SSHSettings("lab"))
    with pytest.raises(ClusterError, match="the key file /no/key cannot be read .*Correct `key_file`"):
        find_route(SSHSettings("other", key_file="/no/key"))


@pytest.mark.parametrize(("found", "said"), [(None, "is not installed here"), ("/bin/dbclient", "is not OpenSSH's")])
def test_without_the_program_the_fix_is_reported(monkeypatch: pytest.MonkeyPatch, found: str | None, said: str) -> None:
    monkeypatch.setattr(ssh_program, "has_openssh", lambda: False)
    monkeypatch.setattr(ssh_program.shutil, "which", lambda name: found)
    with pytest.raises(ClusterError, match=rf"^lab: .*{said}; install OpenSSH's client .*or remove `transport`"):
        require_program("lab")
    with pytest.raises(ClusterError, match=rf"^lab: `encrypt: ssh` needs .*{said}; install .*, or remove `encrypt`$"):
        require_program("lab", "encrypt: ssh")


def test_forwards_use_the_fastest_cipher_that_the_configuration_offers(folder: Path) -> None:
    (folder / "config").write_text(
        "Host lab\n  Ciphers aes256-ctr,aes128-gcm@openssh.com\nHost old\n  Ciphers aes256-ctr\n"
    )
    said = [fastest_cipher(find_route(SSHSettings(host))[0].options.ciphers) for host in ("lab", "old")]
    assert said == [["-o", "Ciphers=aes128-gcm@openssh.com,aes256-ctr"], ["-o", "Ciphers=aes256-ctr"]]
    assert fastest_cipher(()) == []


def test_forwards_are_on_loopback_alone() -> None:
    command = forwarding("/socket", [(20001, 15000)], [20002, 16000])
    options = command[command.index("forward") + 1 : command.index("--")]
    assert options == [
        *("-L", "127.0.0.1:20001:127.0.0.1:15000"),
        *("-R", "127.0.0.1:0:127.0.0.1:20002"),
        *("-R", "127.0.0.1:0:127.0.0.1:16000"),
    ]


def test_the_transport_of_a_group_goes_before_the_clusters() -> None:
    nodes = [
        {"address": "10.0.0.1", "chief": True},
        {"address": "10.0.0.2"},
        {"address": "10.0.0.3", "ssh_config": "g"},
        {"address": "10.0.0.4", "ssh_config": "h"},
    ]
    content = {"nodes": nodes, "ssh": {"g": {}, "h": {"transport": "paramiko"}}, "transport": "openssh"}
    spec = ResourceSpec.from_dict(content)
    made = [ssh_settings(spec, node) for node in ResourceSpec.from_payload(spec.to_payload()).nodes[1:]]
    assert [settings and settings.transport for settings in made] == ["openssh", "openssh", "paramiko"]
    plain = ResourceSpec.from_dict({"nodes": nodes[:2]})
    settings = ssh_settings(plain, plain.nodes[1])
    assert settings is not None and settings.transport == "paramiko"
