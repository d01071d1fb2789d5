"""What the user's SSH configuration says of one host, as OpenSSH itself reads it where that is installed."""

from __future__ import annotations

import functools
import getpass
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramiko

from autodist.errors import ClusterError

ANSWER_LIMIT = 10.0
"""Seconds for `ssh -G`, which may look up names and run commands that the configuration names."""

_SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"
_DEFAULT_KEYS = [f"~/.ssh/id_{kind}" for kind in ("rsa", "ecdsa", "ed25519")]
_NOT_A_FAULT = "Pseudo-terminal will not be allocated"


@dataclass(frozen=True)
class SSHOptions:
    """The options that count here, tokens and `~` replaced.

    Attributes:
        hostname: name or address to connect to.
        port: of the SSH server.
        user: to log in as.
        identity_files: private keys to offer, whether they are there or not.
        known_hosts: files of the user; none where the configuration says so.
        system_known_hosts: files of the system.
        host_key_alias: under which name the host's key is looked up, in place of its own and of the port.
        proxy_jump: hosts to go through, in order.
        proxy_command: a command whose streams are the connection.
        identities_only: whether an agent's other keys are left alone.
        uses_agent: whether an agent is asked at all.
        control_path: of a connection that other programs may have left open; its tokens still in it.
    """

    hostname: str
    port: int
    user: str
    identity_files: tuple[str, ...]
    known_hosts: tuple[str, ...]
    system_known_hosts: tuple[str, ...]
    host_key_alias: str | None
    proxy_jump: tuple[str, ...]
    proxy_command: str | None
    identities_only: bool
    uses_agent: bool
    control_path: str | None = None


def read_options(host: str, username: str | None, port: int | None, jumps: Sequence[str] = ()) -> SSHOptions:
    """The options for one host.

    `ssh -G` prints what OpenSSH makes of all files, `Include` and `Match` among them. Without OpenSSH paramiko reads
    `~/.ssh/config`, and so it does for a user without an entry in passwd, for whom OpenSSH does nothing; it knows no
    `Include`.

    Args:
        host: name or address, as for the `ssh` command.
        username: what the YAML says, before the configuration.
        port: likewise.
        jumps: hosts to go through, in place of those in the configuration.

    Raises:
        ClusterError: the configuration cannot be read, with what OpenSSH says of it; this process's user has no name.
    """
    own = _own_name(host)
    found = _ask_openssh(host, username, port, jumps) if has_openssh() and _has_entry() else _ask_paramiko(host)
    hostname = _only(found, "hostname", host)
    number = port or _number(host, _only(found, "port", "22"))
    user = username or _only(found, "user", "") or own
    tokens = {"%": "%", "d": str(_home()), "h": hostname, "i": str(os.getuid()), "n": host, "p": str(number)}
    tokens |= {"r": user, "u": own, "l": socket.gethostname()}
    tokens["L"] = tokens["l"].split(".")[0]
    alias = found.get("hostkeyalias")
    tokens["k"] = alias[0] if alias else host

    def paths(name: str, default: Sequence[str]) -> tuple[str, ...]:
        return tuple(_expanded(path, tokens) for path in found.get(name, default) if path.lower() != "none")

    configured = _only(found, "proxyjump", "none")
    command = _only(found, "proxycommand", "none")
    control = _only(found, "controlpath", "none")
    return SSHOptions(
        hostname=hostname,
        port=number,
        user=user,
        identity_files=paths("identityfile", _DEFAULT_KEYS),
        known_hosts=paths("userknownhostsfile", ["~/.ssh/known_hosts", "~/.ssh/known_hosts2"]),
        system_known_hosts=paths("globalknownhostsfile", [_SYSTEM_KNOWN_HOSTS, _SYSTEM_KNOWN_HOSTS + "2"]),
        host_key_alias=alias[0] if alias else None,
        proxy_jump=tuple(jumps) or (() if configured.lower() == "none" else tuple(configured.split(","))),
        proxy_command=None if command.lower() == "none" else _with_tokens(command, tokens),
        identities_only=_only(found, "identitiesonly", "no") == "yes",
        uses_agent=_only(found, "identityagent", "").lower() != "none",
        control_path=None if control.lower() == "none" else control,
    )


@functools.cache
def has_openssh() -> bool:
    """Whether the `ssh` here is OpenSSH's; others (Dropbear's) take -G for nothing, and connect."""
    program = shutil.which("ssh")
    if program is None:
        return False
    try:
        said = _run([program, "-V"])
    except (OSError, subprocess.SubprocessError):
        return False
    return b"OpenSSH" in said.stderr + said.stdout


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    """What a command answers in time; what it has started itself, as for `Match exec`, ends with it."""
    none, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(command, stdin=none, stdout=pipe, stderr=pipe, start_new_session=True) as process:
        try:
            stdout, stderr = process.communicate(timeout=ANSWER_LIMIT)
        except BaseException:  # too late, or Ctrl-C
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _ask_openssh(host: str, username: str | None, port: int | None, jumps: Sequence[str]) -> dict[str, list[str]]:
    said = ["-l", username] if username else []
    said += ["-p", str(port)] if port else []
    said += ["-J", ",".join(jumps)] if jumps else []
    command = ["ssh", "-G", *other_home(), *said, "--", host]
    try:
        done = _run(command)
    except subprocess.TimeoutExpired as error:
        raise ClusterError(
            f"{host}: reading the SSH configuration takes more than {ANSWER_LIMIT:.0f} s. See what `ssh -G {host}` "
            "waits for: a command of `Match exec`, or a name that is looked up."
        ) from error
    if done.returncode:
        lines = [line for line in done.stderr.decode(errors="replace").splitlines() if _NOT_A_FAULT not in line]
        raise ClusterError(_unusable(host, "; ".join(lines) or f"`ssh -G {host}` fails"))
    found: dict[str, list[str]] = {}
    for line in done.stdout.decode(errors="replace").splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key, []).extend(_paths_in(value) if key.endswith("knownhostsfile") else [value])
    return found


def other_home() -> list[str]:
    """OpenSSH goes by the user's entry in passwd, while $HOME may be another folder, as in containers."""
    home, config = _home(), _home() / ".ssh" / "config"
    if home == Path(_passwd_home()):
        return []
    return ["-F", str(config) if config.is_file() else "none"]


def _home() -> Path:
    """The user's home directory; for one who has none it is `/`, as Docker sets it."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def _own_name(host: str) -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError) as error:  # the latter from Python 3.13 on
        raise ClusterError(
            f"{host}: the user {os.getuid()} of this process has no name, as in a container of another user than its "
            "image's. Set the environment variable LOGNAME to one: it is the name to log in with, unless `username` in "
            "the node's group under `ssh` says another."
        ) from error


def _has_entry() -> bool:
    """Whether this process's user stands in passwd; one of a container may not."""
    try:
        return bool(pwd.getpwuid(os.getuid()))
    except KeyError:
        return False


def _passwd_home() -> str:
    return pwd.getpwuid(os.getuid()).pw_dir if _has_entry() else str(_home())


def _paths_in(value: str) -> list[str]:
    """The files of a list that OpenSSH prints without quotes: names with blanks are told by what is there."""
    words, found = value.split(" "), []
    while words:
        whole = next((n for n in range(len(words), 1, -1) if Path(" ".join(words[:n])).is_file()), 1)
        found.append(" ".join(words[:whole]))
        del words[:whole]
    return found


def _ask_paramiko(host: str) -> dict[str, list[str]]:
    path = _home() / ".ssh" / "config"
    try:
        config = paramiko.SSHConfig.from_path(str(path)) if path.is_file() else paramiko.SSHConfig()
        options: Mapping[str, Any] = config.lookup(host)
    except (paramiko.ConfigParseError, paramiko.SSHException, OSError, ValueError, ImportError) as error:
        # ImportError: `Match exec` and others need a package that paramiko does not ask for.
        raise ClusterError(_unusable(host, f"{path}: {error}")) from error
    lists = {key: value if isinstance(value, list) else [value] for key, value in options.items()}
    files = {key: value[0].split() for key, value in lists.items() if key.endswith("knownhostsfile")}
    return lists | files


def _unusable(host: str, reason: str) -> str:
    return f"{host}: the SSH configuration cannot be used: {reason}. Correct it; `ssh -G {host}` shows what it says."


def _only(found: Mapping[str, list[str]], key: str, default: str) -> str:
    return found[key][0] if found.get(key) else default


def _number(host: str, port: str) -> int:
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ClusterError(_unusable(host, f"the port {port!r} is no number from 1 to 65535"))
    return int(port)


def _expanded(path: str, tokens: Mapping[str, str]) -> str:
    path = re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match[1], match[0]), _with_tokens(path, tokens))
    folder = os.path.join(_passwd_home(), ".ssh", "")
    if path.startswith(folder):  # what OpenSSH made of ~/.ssh
        path = os.path.join("~", ".ssh", path.removeprefix(folder))
    return os.path.expanduser(path)


def _with_tokens(text: str, tokens: Mapping[str, str]) -> str:
    return re.sub(r"%(.)", lambda match: tokens.get(match[1], match[0]), text)
