"""The user's SSH configuration for one host, read by OpenSSH if it is installed, else by paramiko."""

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
"""Timeout of `ssh -G` in seconds; it may resolve names and run commands of the configuration."""

_SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"
_DEFAULT_KEYS = [f"~/.ssh/id_{kind}" for kind in ("rsa", "ecdsa", "ed25519")]
_NOT_A_FAULT = "Pseudo-terminal will not be allocated"


@dataclass(frozen=True)
class SSHOptions:
    """The options of the SSH configuration that AutoDist uses, with tokens and `~` expanded.

    Attributes:
        hostname: name or address to connect to.
        port: port of the SSH server.
        user: user name for the login.
        identity_files: private keys to offer; the files may not exist.
        known_hosts: known_hosts files of the user; may be empty.
        system_known_hosts: known_hosts files of the system.
        host_key_alias: name under which the host's key is looked up, in place of its own name and port.
        proxy_jump: jump hosts, in order.
        proxy_command: command whose standard streams are the connection.
        identities_only: True if an agent's other keys are not offered.
        uses_agent: True if the keys of an agent are offered.
        control_path: socket of a connection that another program may have left open, with unexpanded tokens.
        ciphers: the ciphers that OpenSSH offers, in order; empty without OpenSSH.
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
    ciphers: tuple[str, ...] = ()


def read_options(host: str, username: str | None, port: int | None, jumps: Sequence[str] = ()) -> SSHOptions:
    """Reads the options for one host.

    `ssh -G` prints the options that OpenSSH finds in all files, including `Include` and `Match`. paramiko reads
    `~/.ssh/config`, without `Include`, if OpenSSH is not installed or the user has no entry in passwd, which OpenSSH
    requires.

    Args:
        host: name or address, as for the `ssh` command.
        username: user name in the YAML, which overrides the configuration.
        port: port in the YAML, which overrides the configuration.
        jumps: jump hosts that replace those of the configuration.

    Raises:
        ClusterError: the configuration cannot be read; quotes OpenSSH's message. Or this process's user has no name.
    """
    login_name = _login_name(host)
    options = (
        _read_with_openssh(host, username, port, jumps)
        if has_openssh() and _is_in_passwd()
        else _read_with_paramiko(host)
    )
    hostname = _first_value(options, "hostname", host)
    number = port or _number(host, _first_value(options, "port", "22"))
    user = username or _first_value(options, "user", "") or login_name
    tokens = {"%": "%", "d": str(_home()), "h": hostname, "i": str(os.getuid()), "n": host, "p": str(number)}
    tokens |= {"r": user, "u": login_name, "l": socket.gethostname()}
    tokens["L"] = tokens["l"].split(".")[0]
    alias = options.get("hostkeyalias")
    tokens["k"] = alias[0] if alias else host

    def paths(name: str, default: Sequence[str]) -> tuple[str, ...]:
        return tuple(_expanded(path, tokens) for path in options.get(name, default) if path.lower() != "none")

    configured = _first_value(options, "proxyjump", "none")
    command = _first_value(options, "proxycommand", "none")
    control = _first_value(options, "controlpath", "none")
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
        identities_only=_first_value(options, "identitiesonly", "no") == "yes",
        uses_agent=_first_value(options, "identityagent", "").lower() != "none",
        control_path=None if control.lower() == "none" else control,
        ciphers=tuple(filter(None, _first_value(options, "ciphers", "").split(","))),
    )


@functools.cache
def has_openssh() -> bool:
    """Returns True if `ssh` on this machine is OpenSSH's; others (Dropbear's) ignore -G and connect."""
    program = shutil.which("ssh")
    if program is None:
        return False
    try:
        done = _run([program, "-V"])
    except (OSError, subprocess.SubprocessError):
        return False
    return b"OpenSSH" in done.stderr + done.stdout


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    """Runs a command; at the timeout, ends it and its child processes, such as those of `Match exec`."""
    none, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(command, stdin=none, stdout=pipe, stderr=pipe, start_new_session=True) as process:
        try:
            stdout, stderr = process.communicate(timeout=ANSWER_LIMIT)
        except BaseException:  # too late, or Ctrl-C
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _read_with_openssh(host: str, username: str | None, port: int | None, jumps: Sequence[str]) -> dict[str, list[str]]:
    overrides = ["-l", username] if username else []
    overrides += ["-p", str(port)] if port else []
    overrides += ["-J", ",".join(jumps)] if jumps else []
    command = ["ssh", "-G", *other_home(), *overrides, "--", host]
    try:
        done = _run(command)
    except subprocess.TimeoutExpired as error:
        raise ClusterError(
            f"{host}: reading the SSH configuration takes more than {ANSWER_LIMIT:.0f} s. Find out what `ssh -G "
            f"{host}` waits for: a command of `Match exec`, or a name that is resolved."
        ) from error
    if done.returncode:
        lines = [line for line in done.stderr.decode(errors="replace").splitlines() if _NOT_A_FAULT not in line]
        raise ClusterError(_unusable(host, "; ".join(lines) or f"`ssh -G {host}` fails"))
    options: dict[str, list[str]] = {}
    for line in done.stdout.decode(errors="replace").splitlines():
        key, _, value = line.partition(" ")
        options.setdefault(key, []).extend(_paths_in(value) if key.endswith("knownhostsfile") else [value])
    return options


def other_home() -> list[str]:
    """Returns the options that make OpenSSH use $HOME instead of the user's home in passwd, if they differ."""
    home, config = _home(), _home() / ".ssh" / "config"
    if home == Path(_passwd_home()):
        return []
    return ["-F", str(config) if config.is_file() else "none"]


def _home() -> Path:
    """Returns the user's home directory; `/` if there is none, as in Docker."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def _login_name(host: str) -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError) as error:  # OSError from Python 3.13 on
        raise ClusterError(
            f"{host}: the user {os.getuid()} of this process has no name, as in a container of another user than its "
            "image's. Set the environment variable LOGNAME: it is the name to log in with, unless the node's group "
            "under `ssh` has a `username`."
        ) from error


def _is_in_passwd() -> bool:
    """Returns True if this process's user has an entry in passwd; a container's user may have none."""
    try:
        return bool(pwd.getpwuid(os.getuid()))
    except KeyError:
        return False


def _passwd_home() -> str:
    return pwd.getpwuid(os.getuid()).pw_dir if _is_in_passwd() else str(_home())


def _paths_in(value: str) -> list[str]:
    """Splits a list of files that OpenSSH prints without quotes; detects names with blanks by the existing files."""
    words, files = value.split(" "), []
    while words:
        count = next((n for n in range(len(words), 1, -1) if Path(" ".join(words[:n])).is_file()), 1)
        files.append(" ".join(words[:count]))
        del words[:count]
    return files


def _read_with_paramiko(host: str) -> dict[str, list[str]]:
    path = _home() / ".ssh" / "config"
    try:
        config = paramiko.SSHConfig.from_path(str(path)) if path.is_file() else paramiko.SSHConfig()
        values: Mapping[str, Any] = config.lookup(host)
    except (paramiko.ConfigParseError, paramiko.SSHException, OSError, ValueError, ImportError) as error:
        # ImportError: `Match exec` and others need a package that paramiko does not depend on.
        raise ClusterError(_unusable(host, f"{path}: {error}")) from error
    lists = {key: value if isinstance(value, list) else [value] for key, value in values.items()}
    files = {key: value[0].split() for key, value in lists.items() if key.endswith("knownhostsfile")}
    return lists | files


def _unusable(host: str, reason: str) -> str:
    return f"{host}: the SSH configuration cannot be used: {reason}. Correct it; `ssh -G {host}` shows its content."


def _first_value(options: Mapping[str, list[str]], key: str, default: str) -> str:
    return options[key][0] if options.get(key) else default


def _number(host: str, port: str) -> int:
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ClusterError(_unusable(host, f"the port {port!r} is not a number from 1 to 65535"))
    return int(port)


def _expanded(path: str, tokens: Mapping[str, str]) -> str:
    path = re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match[1], match[0]), _with_tokens(path, tokens))
    folder = os.path.join(_passwd_home(), ".ssh", "")
    if path.startswith(folder):  # OpenSSH's expansion of ~/.ssh
        path = os.path.join("~", ".ssh", path.removeprefix(folder))
    return os.path.expanduser(path)


def _with_tokens(text: str, tokens: Mapping[str, str]) -> str:
    return re.sub(r"%(.)", lambda match: tokens.get(match[1], match[0]), text)
