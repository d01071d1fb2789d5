"""Connections of both transports to real SSH servers, with the user's own SSH configuration."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import paramiko
import pytest

from autodist.cluster import ssh_config, ssh_paramiko, ssh_program_machine
from autodist.cluster.ssh_paramiko import connect
from autodist.cluster.ssh_settings import SSHSettings
from autodist.cluster.ssh_transports import reach
from autodist.errors import ClusterError
from autodist.resources import ResourceSpec
from tests.cluster.hosts import Host, LoopbackHosts

pytestmark = [pytest.mark.processes, pytest.mark.ssh]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHosts]:
    with LoopbackHosts(tmp_path_factory.mktemp("hosts"), options=["LogLevel DEBUG1"]) as made:
        yield made


@pytest.fixture
def home(hosts: LoopbackHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory with a key that the hosts take, without known hosts or a configuration."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    folder = tmp_path / ".ssh"
    folder.mkdir()
    for name in ("user_key", "user_key.pub"):
        shutil.copy(hosts.directory / name, folder / name.replace("user_key", "id_ed25519"))
    return folder


@dataclass(frozen=True)
class Client:
    """A transport, and the reader of the user's configuration.

    Attributes:
        folder: ~/.ssh.
        transport: "paramiko" or "openssh".
    """

    folder: Path
    transport: str

    def configure(self, text: str) -> None:
        (self.folder / "config").write_text(text)

    def log_in(self, settings: SSHSettings | str) -> bytes:
        """Returns the output of a command, in a login of its own."""
        settings = SSHSettings(settings) if isinstance(settings, str) else settings
        with reach(replace(settings, transport=self.transport), 10, lambda seconds: True) as machine:
            return machine.run(["echo", "$HOME 'there'"], 10)


@pytest.fixture(params=["paramiko", "paramiko-without-openssh", "openssh"])
def client(request: pytest.FixtureRequest, home: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    """Each transport; OpenSSH reads the configuration or, if it is not installed, paramiko."""
    if request.param == "paramiko-without-openssh":
        monkeypatch.setattr(ssh_config, "has_openssh", lambda: False)
    return Client(home, request.param.partition("-")[0])


by_each_transport = pytest.mark.parametrize("client", ["paramiko", "openssh"], indirect=True)
by_the_program = pytest.mark.parametrize("client", ["openssh"], indirect=True)

ANSWER = b"$HOME 'there'\n"


def key_of(hosts: LoopbackHosts) -> str:
    return " ".join((hosts.directory / "host_key.pub").read_text().split()[:2])


def place(host: Host) -> str:
    return f"HostName {host.address}\n  Port {host.port}"


def test_bad_lines_of_known_hosts_are_skipped_and_its_patterns_count(
    hosts: LoopbackHosts, home: Path, client: Client
) -> None:
    first, second = hosts.hosts
    client.configure("")
    bad = f"{first.address} ssh-ed25519 AAAA!\nnonsense\n[{first.address}]:1 ssh-rsa\n\xff\n"
    (home / "known_hosts").write_text(f"{bad}[127.0.0.?]:* {key_of(hosts)}\n![{first.address}]:1 x y\n", "latin-1")
    assert client.log_in(SSHSettings(first.address, port=first.port)) == ANSWER
    (home / "known_hosts").write_text(f"{bad}[127.0.0.*]:*,![{first.address}]:{first.port} {key_of(hosts)}\n")
    assert client.log_in(SSHSettings(second.address, port=second.port)) == ANSWER
    with pytest.raises(ClusterError, match="its host key is not known.*Lines that cannot be read: .*known_hosts:1, "):
        client.log_in(SSHSettings(first.address, port=first.port))
    (home / "known_hosts").write_text(f"{first.address} {key_of(hosts)}\n")  # without a port: valid for any
    assert client.log_in(SSHSettings(first.address, port=first.port)) == ANSWER
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", home / "known_hosts"], check=True, capture_output=True)
    assert client.log_in(SSHSettings(first.address, port=first.port)) == ANSWER


def test_changed_and_revoked_keys_are_reported(hosts: LoopbackHosts, home: Path, client: Client) -> None:
    first = hosts.hosts[0]
    client.configure("")
    other = paramiko.ECDSAKey.generate()
    names = f"[{first.address}]:{first.port}"
    (home / "known_hosts").write_text(f"{names} {other.get_name()} {other.get_base64()}\n")
    with pytest.raises(ClusterError, match=r"its host key has changed \(ssh-ed25519 SHA256:.*`ssh-keygen -R "):
        client.log_in(SSHSettings(first.address, port=first.port))
    (home / "known_hosts").write_text(f"{names} {key_of(hosts)}\n@revoked * {key_of(hosts)}\n")
    with pytest.raises(ClusterError, match="its host key is marked as revoked"):
        client.log_in(SSHSettings(first.address, port=first.port))
    assert client.log_in(SSHSettings(first.address, port=first.port, host_key_checking=False)) == ANSWER


def test_host_key_alias_and_files_of_known_hosts_are_those_of_the_configuration(
    hosts: LoopbackHosts, home: Path, client: Client
) -> None:
    first = hosts.hosts[0]
    (home / "known_lab").write_text(f"machine {key_of(hosts)}\n")
    client.configure(
        f"Host lab\n  {place(first)}\n  HostKeyAlias machine\n  UserKnownHostsFile ~/.ssh/nothing ~/.ssh/known_%n\n"
    )
    assert client.log_in("lab") == ANSWER
    client.configure(f"Host lab\n  {place(first)}\n  HostKeyAlias other\n  UserKnownHostsFile ~/.ssh/known_%n\n")
    with pytest.raises(ClusterError, match=r"ssh-keyscan .* \| sed 's/.*/other/' >> .*known_lab`"):
        client.log_in("lab")
    (home / "known_hosts").write_text(f"other {key_of(hosts)}\n")
    client.configure(f"Host lab\n  {place(first)}\n  HostKeyAlias other\n  UserKnownHostsFile none\n")
    with pytest.raises(ClusterError, match="its host key is not known"):
        client.log_in("lab")


def test_a_jump_host_that_is_a_node_is_checked_as_its_group_says(
    hosts: LoopbackHosts, home: Path, client: Client
) -> None:
    first, second = hosts.hosts
    known = home / "known first %"
    known.write_text(f"[{first.address}]:{first.port} {key_of(hosts)}\n")
    (home / "known_hosts").write_text(f"[{second.address}]:{second.port} {key_of(hosts)}\n")
    client.configure(f"Host target\n  {place(second)}\n  ProxyJump first\nHost first\n  HostName {first.address}\n")
    target = SSHSettings("target")
    with pytest.raises(ClusterError, match=r"^first \(127.0.0.2 port 22\): "):
        client.log_in(target)
    jump = SSHSettings(first.address, port=first.port, known_hosts=str(known), environment={"SECRET": "x"})
    through = target.through([jump, target])
    assert list(through.others) == [first.address] and "SECRET" not in str(through.to_json())
    assert client.log_in(SSHSettings(**through.to_json())) == ANSWER


@pytest.mark.parametrize(
    "config, said",
    [
        ("Host lab\n  ProxyJump lab\n", "^lab: the SSH configuration cannot be used: jumphost loop via lab"),
        ("Host lab\n  Port abc\n", "^lab: the SSH configuration cannot be used: .*config line 2: Bad port 'abc'"),
        (
            "Host lab\n  Nonsense 1\n",
            "^lab: the SSH configuration cannot be used: .*line 2: Bad configuration",
        ),
        ("Host a\n  ProxyJump b\nHost b\n  ProxyJump lab\nHost lab\n  ProxyJump a\n", "lab .*leads through itself"),
    ],
)
def test_what_is_wrong_in_the_configuration_is_reported(home: Path, config: str, said: str) -> None:
    (home / "config").write_text(config)
    with pytest.raises(ClusterError, match=said):
        connect(SSHSettings("lab"))


@pytest.mark.parametrize(
    "config, said",
    [
        ("Host lab\n  ProxyJump lab\n", r"lab .*leads through itself \(lab through lab\); correct `ProxyJump`"),
        ("Host lab\n  Port abc\n", "the SSH configuration cannot be used: the port 'abc' is not a number from 1 to"),
        ("Host 'lab\n", "the SSH configuration cannot be used: .*config: "),
        ("Host lab\n  ProxyJump a\nHost a\n  ProxyJump lab\n", r"\(lab through a through lab\)"),
    ],
)
def test_it_is_reported_without_openssh_too(
    home: Path, config: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_config, "has_openssh", lambda: False)
    (home / "config").write_text(config)
    with pytest.raises(ClusterError, match=said):
        connect(SSHSettings("lab"))


def make_nc(home: Path) -> None:
    """A program that joins its input and output to a port."""
    copy = "import socket, sys, threading, os; s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
    copy += "def up():\n    while data := os.read(0, 9999): s.sendall(data)\n"
    copy += "threading.Thread(target=up, daemon=True).start()\nwhile data := s.recv(9999): os.write(1, data)\n"
    (home / "nc.py").write_text(copy)


@by_each_transport
def test_files_that_the_configuration_includes_are_read(hosts: LoopbackHosts, home: Path, client: Client) -> None:
    first = hosts.hosts[0]
    (home / "more").write_text(f"Host lab\n  {place(first)}\n  RemoteCommand false\n  RequestTTY force\n")
    client.configure(f"Include {home}/more\n")
    (home / "known_hosts").write_text(f"[{first.address}]:{first.port} {key_of(hosts)}\n")
    assert client.log_in("lab") == ANSWER


def test_a_proxy_command_runs_in_a_shell(hosts: LoopbackHosts, home: Path, client: Client) -> None:
    first = hosts.hosts[0]
    (home / "known_hosts").write_text(f"[{first.address}]:{first.port} {key_of(hosts)}\n")
    make_nc(home)
    client.configure(f'Host lab\n  {place(first)}\n  ProxyCommand python3 "$HOME/.ssh/nc.py" %h %p 2>/dev/null\n')
    assert client.log_in("lab") == ANSWER
    client.configure("Host lab\n  ProxyCommand sh -c 'echo broken >&2; exit 3'\n")
    reason = "broken" if client.transport == "openssh" else "exit status 3"
    with pytest.raises(ClusterError, match=f"^lab .*the ProxyCommand .* failed: {reason}. Try `ssh "):
        client.log_in("lab")


def test_a_greeting_may_take_longer_than_reaching_the_port(
    hosts: LoopbackHosts, home: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hosts.hosts[0]
    (home / "known_hosts").write_text(f"[{first.address}]:{first.port} {key_of(hosts)}\n")
    make_nc(home)
    for module in (ssh_paramiko, ssh_program_machine):
        monkeypatch.setattr(module, "ONE_TRY", 0.5)
    client.configure(f"Host lab\n  {place(first)}\n  ProxyCommand sh -c 'sleep 1; exec python3 {home}/nc.py %h %p'\n")
    assert client.log_in("lab") == ANSWER


def test_settings_of_other_groups_come_from_the_yaml(hosts: LoopbackHosts) -> None:
    nodes = [{"address": "a", "chief": True}, {"address": "b", "ssh_config": "g"}, {"address": "c", "ssh_config": "h"}]
    groups = {"g": {"known_hosts": "/kh"}, "h": {"username": "ann", "shared_envs": {"A": "b"}}}
    spec = ResourceSpec.from_dict({"nodes": nodes, "ssh": groups})
    made = SSHSettings.from_group("b", spec.ssh["g"], 15.0).through(
        SSHSettings.from_group(node.address, spec.ssh[node.ssh_config], 15.0)
        for node in spec.nodes[1:]
        if node.ssh_config
    )
    assert made.others == {"c": SSHSettings("c", username="ann").to_json()}


def key_files(home: Path, *arguments: str) -> str:
    file = home / "made"
    command = ["ssh-keygen", "-q", "-C", "test", "-f", str(file), *arguments]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return os.fspath(file)


@pytest.mark.parametrize("kind", ["rsa", "ecdsa", "rsa -m PEM", "ecdsa -m PKCS8"])
def test_keys_of_all_formats_log_in(hosts: LoopbackHosts, home: Path, kind: str) -> None:
    first = hosts.hosts[0]
    key = key_files(home, "-N", "", "-t", *kind.split())
    allowed = hosts.directory / "user_key.pub"
    before = allowed.read_text()
    settings = SSHSettings(first.address, port=first.port, key_file=key, host_key_checking=False)
    with pytest.raises(ClusterError, match="it accepts none of the keys offered for user"):
        connect(settings)
    try:
        allowed.write_text(before + Path(key + ".pub").read_text())
        connect(settings).close()
    finally:
        allowed.write_text(before)


def test_a_locked_key_is_reported_unless_an_agent_holds_it(
    hosts: LoopbackHosts, home: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hosts.hosts[0]
    key = home / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", key], check=True, capture_output=True)
    settings = SSHSettings(first.address, port=first.port, host_key_checking=False)
    with_key_file = replace(settings, key_file=str(key))
    for named in (settings, with_key_file):
        with pytest.raises(ClusterError, match=r"id_ed25519 is locked by a passphrase; unlock it: `ssh-add .*ed25519`"):
            client.log_in(named)
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", home / "agent"], stdout=subprocess.PIPE)
    try:
        assert agent.stdout is not None
        assert agent.stdout.readline()  # it listens
        monkeypatch.setenv("SSH_AUTH_SOCK", str(home / "agent"))
        subprocess.run(["ssh-add", "-q", hosts.directory / "user_key"], check=True, capture_output=True)
        for named in (settings, with_key_file):
            assert client.log_in(named) == ANSWER
        client.configure("IdentitiesOnly yes\n")
        assert client.log_in(settings) == ANSWER
        if client.transport == "paramiko":  # OpenSSH finds the public key in the private one
            (home / "id_ed25519.pub").unlink()
            with pytest.raises(ClusterError, match="is locked by a passphrase"):
                client.log_in(settings)
    finally:
        agent.terminate()
        agent.communicate()


@pytest.mark.parametrize("name", ["public", "putty", "folder", "empty", "text", "long", "dsa"])
def test_what_is_no_private_key_is_reported(home: Path, name: str) -> None:
    made = {
        "public": (home / "id_ed25519.pub").read_bytes(),
        "putty": b"PuTTY-User-Key-File-3: ssh-ed25519\n",
        "empty": b"\n",
        "text": b"a poem",
        "long": b"x" * 100_000,
        "dsa": b"-----BEGIN DSA PRIVATE KEY-----\nAAAA\n-----END DSA PRIVATE KEY-----\n",
    }
    said = {
        "public": r"id_ed25519.pub is a public key; give the private one, .*id_ed25519\. Correct `key_file`",
        "putty": "is a key in PuTTY's format; convert it with `puttygen .*putty -O private-openssh",
        "folder": "is a directory; give the private key in it",
        "empty": "is empty",
        "long": "is too long for a key",
    }.get(name, "holds no private key that can be used here; use an RSA, ECDSA or Ed25519 key")
    file = home / ("id_ed25519.pub" if name == "public" else name)
    if name == "folder":
        file.mkdir()
    else:
        file.write_bytes(made[name])
    with pytest.raises(ClusterError, match=said):
        connect(SSHSettings("127.0.0.1", key_file=str(file)))


def test_jump_hosts_are_used_and_named(hosts: LoopbackHosts, home: Path, client: Client) -> None:
    first, second = hosts.hosts
    shutil.copy(hosts.directory / "known_hosts", home)
    gate = f"Host gate\n  {place(first)}\n"
    client.configure(f"{gate}Host far\n  {place(second)}\n  ProxyJump gate\n")
    assert client.log_in("far") == ANSWER
    assert f"target {second.address} port {second.port}" in (hosts.directory / "host1.log").read_text()
    client.configure(f"Host far\n  {place(second)}\n  ProxyJump gate\n{gate}  User nobody1\n")
    with pytest.raises(ClusterError, match=r"^gate \(127.0.0.2 port \d+\): it accepts none of .* for user nobody1"):
        client.log_in("far")
    client.configure(f"Host far\n  HostName {second.address}\n  Port 1\n  ProxyJump gate\n{gate}")
    reason = "refused" if client.transport == "openssh" else "Connect failed"
    with pytest.raises(ClusterError, match=rf"^far .*the jump host could not connect to it .*{reason}"):
        client.log_in("far")


UNREACHABLE = {
    "port": "^127.0.0.2 port 1: connection refused. Start an SSH server",
    "name": "^nowhere.invalid port 22: the name cannot be resolved",
    "key": "the key file /no/key cannot be read",
    "user": "none of the keys .* user no-one",
    "silence": "no SSH session was established: .*`connect_timeout`",
}


@by_each_transport
@pytest.mark.parametrize("case", UNREACHABLE)
def test_what_keeps_a_machine_from_being_reached_is_reported(
    hosts: LoopbackHosts, home: Path, client: Client, case: str
) -> None:
    first = hosts.hosts[0]
    shutil.copy(hosts.directory / "known_hosts", home)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = {
            "port": SSHSettings(first.address, port=1),
            "name": SSHSettings("nowhere.invalid"),
            "key": SSHSettings(first.address, port=first.port, key_file="/no/key"),
            "user": SSHSettings(first.address, port=first.port, username="no-one"),
            "silence": SSHSettings("127.0.0.1", port=silent.getsockname()[1], connect_timeout=5),
        }[case]
        with pytest.raises(ClusterError, match=UNREACHABLE[case]):
            client.log_in(settings)


@by_the_program
def test_a_connection_that_is_open_already_is_used_and_stays(hosts: LoopbackHosts, home: Path, client: Client) -> None:
    shutil.copy(hosts.directory / "known_hosts", home)
    (home / "config").write_text(f"Host lab\n  {place(hosts.hosts[0])}\n  ControlPath ~/c-%n\n")
    path = Path.home() / "c-lab"
    by_hand = ["ssh", "-F", str(home / "config"), "-S", str(path), "-o", f"UserKnownHostsFile={home}/known_hosts"]
    subprocess.run([*by_hand, "-i", home / "id_ed25519", "-fNM", "lab"], check=True, capture_output=True)
    (home / "id_ed25519").unlink()  # there is no other way in
    try:
        (home / "config").write_text((home / "config").read_text().replace("~/c-%n", f"{Path.home()}/c-%n"))
        assert client.log_in("lab") == ANSWER
    finally:
        asked = subprocess.run([*by_hand, "-O", "exit", "lab"], check=False, capture_output=True)
    assert asked.returncode == 0, "it is still there"
    with pytest.raises(ClusterError, match="there is no private key to log in with as user"):
        client.log_in("lab")
