"""The user's SSH configuration, interpreted as by OpenSSH, without a connection."""

from __future__ import annotations

import getpass
import shutil
from pathlib import Path

import pytest

from autodist.cluster import ssh_config
from autodist.cluster.ssh_config import read_options
from autodist.errors import ClusterError
from tests.cluster.runs import command, within

needs_openssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="OpenSSH is not installed")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """~/.ssh of a home directory that is not the one in passwd."""
    monkeypatch.setenv("HOME", str(tmp_path))
    made = tmp_path / ".ssh"
    (made / "config.d").mkdir(parents=True)
    return made


@needs_openssh
def test_includes_are_followed_by_pattern_and_within_a_host(folder: Path) -> None:
    (folder / "config.d" / "10-lab").write_text("Host lab\n  HostName 10.0.0.7\n  Port 2200\n")
    (folder / "config.d" / "20-rest").write_text("Host lab *.lab\n  User ann\n  IdentityFile ~/.ssh/id_lab\n")
    (folder / "proxied").write_text("  ProxyJump gate\n")
    (folder / "config").write_text(
        f"Include {folder}/config.d/*\nInclude {folder}/none\nHost lab\n  Include {folder}/proxied\n"
    )
    lab = read_options("lab", None, None)
    assert (lab.hostname, lab.port, lab.user, lab.proxy_jump) == ("10.0.0.7", 2200, "ann", ("gate",))
    assert str(folder / "id_lab") in lab.identity_files
    other = read_options("b.lab", None, None)
    assert (other.hostname, other.port, other.user, other.proxy_jump) == ("b.lab", 22, "ann", ())


@needs_openssh
def test_what_matches_counts_and_what_the_yaml_says_takes_part(folder: Path) -> None:
    (folder / "config").write_text(
        "Host lab\n  HostName 10.0.0.7\n"
        "Match host 10.0.0.*\n  Port 2200\n"
        "Match originalhost lab user bob\n  IdentityFile ~/.ssh/id_bob\n"
        f'Match localuser {getpass.getuser()} exec "test %n = lab"\n  HostKeyAlias by_command\n'
        'Match exec "false"\n  ProxyJump never\n'
        "Match all\n  User ann\n"
    )
    lab = read_options("lab", None, None)
    assert (lab.hostname, lab.port, lab.user) == ("10.0.0.7", 2200, "ann")
    assert (lab.host_key_alias, lab.proxy_jump) == ("by_command", ())
    assert str(folder / "id_bob") not in lab.identity_files
    of_bob = read_options("lab", "bob", 99)
    assert (of_bob.port, of_bob.user) == (99, "bob")
    assert str(folder / "id_bob") in of_bob.identity_files


@needs_openssh
def test_match_final_sees_the_name_that_was_made(folder: Path) -> None:
    (folder / "config").write_text(
        "Host lab\n  HostName node7.example.org\nMatch final host *.example.org\n  Port 2200\n"
    )
    assert read_options("lab", None, None).port == 2200


@needs_openssh
def test_a_command_that_is_waited_for_is_reported_and_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ssh_config.has_openssh()  # checked now, since it has the same limit
    monkeypatch.setattr(ssh_config, "ANSWER_LIMIT", 1.0)
    (folder / "config").write_text(f'Match exec "echo $$ > {folder}/process; exec sleep 60"\n  Port 2200\n')
    with pytest.raises(ClusterError, match="lab: reading the SSH configuration takes more than .*a command of `Match"):
        read_options("lab", None, None)
    process = int((folder / "process").read_text())
    assert within(10, lambda: not Path(f"/proc/{process}").exists() or not command(process))


def test_without_openssh_match_counts_and_includes_are_unknown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_config, "has_openssh", lambda: False)
    (folder / "more").write_text("Host lab\n  Port 2200\n")
    (folder / "config").write_text(
        f"Include {folder}/more\nHost lab\n  HostName 10.0.0.7\nMatch originalhost lab\n  User ann\n"
    )
    lab = read_options("lab", None, None)
    assert (lab.hostname, lab.port, lab.user) == ("10.0.0.7", 22, "ann")


@pytest.mark.parametrize("home", [True, False])
def test_a_user_without_an_entry_has_the_name_of_the_environment(
    home: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(_: object) -> None:
        raise KeyError("getpwuid(): uid not found: 12345")

    for name in ("LOGNAME", "USER", "LNAME", "USERNAME", *(() if home else ("HOME",))):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", absent)
    (folder / "config").write_text("Host lab\n  HostName 10.0.0.7\n")
    with pytest.raises(ClusterError, match=r"lab: the user \d+ of this process has no name.* Set .* LOGNAME"):
        read_options("lab", "ann", None)
    monkeypatch.setenv("LOGNAME", "bob")
    for username, user in ((None, "bob"), ("ann", "ann")):
        lab = read_options("lab", username, None)
        assert (lab.hostname, lab.user) == ("10.0.0.7" if home else "lab", user)
