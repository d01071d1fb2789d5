"""The command lines of the `ssh` program by which a machine is reached, jump hosts included."""

from __future__ import annotations

import math
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autodist.cluster.ssh_config import SSHOptions, has_openssh, other_home, read_options
from autodist.cluster.ssh_errors import Endpoint
from autodist.cluster.ssh_keys import UnusableKeyError, read_key
from autodist.cluster.ssh_settings import SSHSettings, endpoint_of, jump_settings, require_progress
from autodist.errors import ClusterError

_BEATS = 3
"""How often `ssh` asks a server that says nothing, before it ends by itself."""

# What the user's configuration may ask for and a run must not do: forward ports (which others of the same machine would
# find taken), run other commands, go to the background, or write into known_hosts.
_ALWAYS = (
    "BatchMode=yes",
    "LogLevel=DEBUG1",  # says when the login is done, which key the server showed, and which were offered
    "IgnoreUnknown=ForkAfterAuthentication,SessionType,StdinNull",  # before OpenSSH 8.7
    "ForkAfterAuthentication=no",
    "StdinNull=no",
    "ClearAllForwardings=yes",
    "ForwardX11=no",
    "RemoteCommand=none",
    "PermitLocalCommand=no",
    "UpdateHostKeys=no",
    "ControlPersist=no",
    "ConnectionAttempts=1",
)


@dataclass(frozen=True)
class Hop:
    """A machine on the way, or the one that it leads to.

    Attributes:
        settings: of the machine.
        options: that the user's configuration has of it.
        endpoint: for messages.
    """

    settings: SSHSettings
    options: SSHOptions
    endpoint: Endpoint


def require_program(host: str) -> None:
    """Passes where there is an `ssh` of OpenSSH.

    Raises:
        ClusterError: with the mend.
    """
    if not has_openssh():
        found = "is none of OpenSSH" if shutil.which("ssh") else "is not installed here"
        raise ClusterError(
            f"{host}: it is to be reached by the `ssh` program (`transport: openssh`), which {found}; install "
            "OpenSSH's client (`apt install openssh-client`), or leave `transport` out"
        )


def find_way(settings: SSHSettings) -> list[Hop]:
    """The machine itself, then those through which it is reached, the nearest to it first.

    Raises:
        ClusterError: the configuration cannot be used, the way leads in a circle, or a key file is not there.
    """
    way: list[Hop] = []
    jumps: Sequence[str] = ()
    while True:
        options = read_options(settings.host, settings.username, settings.port, jumps)
        endpoint = endpoint_of(settings, options)
        require_progress(endpoint, [hop.endpoint for hop in reversed(way)])
        _check_key_file(settings, endpoint)
        way.append(Hop(settings, options, endpoint))
        if not options.proxy_jump:
            return way
        *jumps, last = options.proxy_jump
        settings = replace(jump_settings(last, settings.others), connect_timeout=settings.connect_timeout)


def _check_key_file(settings: SSHSettings, endpoint: Endpoint) -> None:
    """Passes unless the YAML names a key that is not there; which kinds of keys are of use, `ssh` knows."""
    if settings.key_file is None:
        return
    try:
        read_key(settings.key_file)
    except UnusableKeyError as error:
        raise ClusterError(f"{endpoint}: the key file {error}. Correct `key_file`.") from error


def command_line(way: Sequence[Hop], silence: float, connect_timeout: float, folder: str) -> list[str]:
    """The program and its options for a machine; `--`, the host and what is wanted come behind.

    Args:
        way: to the machine.
        silence: seconds without a word that are no harm; the program ends by itself some time after.
        connect_timeout: seconds for reaching a port and for what the server says then, until keys are offered.
        folder: where those of the jump hosts write what they have to say, see `log_of`.
    """
    hop, *before = way
    said = [*_ALWAYS, f"ConnectTimeout={math.ceil(connect_timeout)}", *_of_settings(hop)]
    said += [f"ServerAliveInterval={math.ceil(silence)}", f"ServerAliveCountMax={_BEATS}"]
    if before:
        inner = command_line(before, silence, connect_timeout, folder)
        place = f"[{hop.endpoint.host}]:{hop.endpoint.port}"
        inner += ["-o", "ControlMaster=no", "-E", log_of(folder, len(before)), "-W", place]
        inner += ["--", before[0].settings.host]
        said += ["ProxyUseFdpass=no", "ProxyCommand=" + shlex.join(inner).replace("%", "%%")]
    options = [part for option in said for part in ("-o", option)]
    login = ["-l", hop.settings.username] if hop.settings.username else []
    login += ["-p", str(hop.settings.port)] if hop.settings.port else []
    return ["ssh", "-T", *other_home(), *options, *login]


def log_of(folder: str, number: int) -> str:
    """The file with what the program says that reaches a jump host.

    Args:
        folder: a private one.
        number: of hosts on the way to the jump host, itself counted.
    """
    return os.path.join(folder, f"jump{number}.log")


def master(line: Sequence[str], socket: str, host: str) -> list[str]:
    """The command that logs in and holds the connection, for commands that join it."""
    return [*line, "-o", "ControlMaster=yes", "-S", socket, "-N", "--", host]


def joining(line: Sequence[str], socket: str | None) -> list[str]:
    """The program and its options for a command on a connection that is there, and on no other.

    Args:
        line: as `command_line` has it.
        socket: of the connection; None: as the user's configuration says.
    """
    program, *options = line
    path = [] if socket is None else ["-S", socket]
    # Where the connection takes no more commands, the program would log in anew by itself, and perhaps ask for a key.
    return [program, "-o", "ProxyCommand=false", "-o", "ControlMaster=no", *path, *options]


def _of_settings(hop: Hop) -> list[str]:
    """Options for the host's key and the user's."""
    settings, said = hop.settings, []
    if not settings.host_key_checking:
        said += ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "GlobalKnownHostsFile=/dev/null"]
    else:
        said.append("StrictHostKeyChecking=yes")
        if settings.known_hosts:
            said += [f"UserKnownHostsFile={_quoted(settings.known_hosts)}", "GlobalKnownHostsFile=/dev/null"]
        elif other_home():
            files = " ".join(map(_quoted, hop.options.known_hosts)) or "none"
            said.append(f"UserKnownHostsFile={files}")
    if settings.key_file:
        # An agent may hold more keys than a server lets one try.
        said += [f"IdentityFile={_quoted(settings.key_file)}", "IdentitiesOnly=yes"]
    elif other_home():
        said += [f"IdentityFile={_quoted(file)}" for file in hop.options.identity_files if os.path.exists(file)]
    return said


def _quoted(path: str) -> str:
    """As a configuration file has a path: blanks would end it, and `%` begins a token."""
    return '"' + path.replace("%", "%%").replace('"', '\\"') + '"'
