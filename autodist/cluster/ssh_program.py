"""The command lines of the `ssh` program for a machine, including its jump hosts."""

from __future__ import annotations

import math
import os
import shlex
import shutil
from collections.abc import Sequence

from autodist.cluster.ssh_config import has_openssh, other_home
from autodist.cluster.ssh_route import Hop
from autodist.errors import ClusterError

_BEATS = 3
"""Number of keep-alive messages that `ssh` sends to a silent server before it ends."""

# Override settings of the user's configuration that would break a run: port forwarding (the ports may be taken by other
# connections), other commands, going to the background, and writing to known_hosts.
_ALWAYS = (
    "BatchMode=yes",
    "LogLevel=DEBUG1",  # reports the end of the login, the server's key and the offered keys
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


def require_program(host: str, setting: str = "transport: openssh") -> None:
    """Checks that OpenSSH's `ssh` is installed.

    Args:
        host: name of the machine, for messages.
        setting: the line of the YAML that needs it.

    Raises:
        ClusterError: it is not installed.
    """
    if not has_openssh():
        problem = "is not OpenSSH's" if shutil.which("ssh") else "is not installed here"
        raise ClusterError(
            f"{host}: `{setting}` needs the `ssh` program, which {problem}; install OpenSSH's client "
            f"(`apt install openssh-client`), or remove `{setting.partition(':')[0]}`"
        )


def command_line(route: Sequence[Hop], timeout: float, connect_timeout: float, folder: str) -> list[str]:
    """Returns the program and its options for a machine; the caller appends `--`, the host and the command.

    Args:
        route: the machine and its jump hosts, as `find_route` returns them.
        timeout: seconds without a response that are allowed; the program ends some time later.
        connect_timeout: seconds for reaching a port, and for the handshake until keys are offered.
        folder: folder for the output of the programs that connect to jump hosts; see `log_of`.
    """
    hop, *before = route
    values = [*_ALWAYS, f"ConnectTimeout={math.ceil(connect_timeout)}", *_of_settings(hop)]
    values += [f"ServerAliveInterval={math.ceil(timeout)}", f"ServerAliveCountMax={_BEATS}"]
    if before:
        inner = command_line(before, timeout, connect_timeout, folder)
        place = f"[{hop.endpoint.host}]:{hop.endpoint.port}"
        inner += ["-o", "ControlMaster=no", "-E", log_of(folder, len(before)), "-W", place]
        inner += ["--", before[0].settings.host]
        values += ["ProxyUseFdpass=no", "ProxyCommand=" + shlex.join(inner).replace("%", "%%")]
    options = [part for value in values for part in ("-o", value)]
    login = ["-l", hop.settings.username] if hop.settings.username else []
    login += ["-p", str(hop.settings.port)] if hop.settings.port else []
    return ["ssh", "-T", *other_home(), *options, *login]


def log_of(folder: str, number: int) -> str:
    """Returns the path of the file for the output of the program that connects to a jump host.

    Args:
        folder: a private folder.
        number: position of the jump host, counted from 1 at the chief.
    """
    return os.path.join(folder, f"jump{number}.log")


def master(line: Sequence[str], socket: str, host: str) -> list[str]:
    """Returns the command that logs in and holds the connection, for commands that join it."""
    return [*line, "-o", "ControlMaster=yes", "-S", socket, "-N", "--", host]


def joining(line: Sequence[str], socket: str | None) -> list[str]:
    """Returns the program and its options for a command on an existing connection.

    Args:
        line: result of `command_line`.
        socket: socket of the connection; None for the one in the user's configuration.
    """
    program, *options = line
    path = [] if socket is None else ["-S", socket]
    # If the connection accepts no more commands, the program would otherwise log in again, and perhaps prompt.
    return [program, "-o", "ProxyCommand=false", "-o", "ControlMaster=no", *path, *options]


def forwarding(socket: str | None, to_machine: Sequence[tuple[int, int]], from_machine: Sequence[int]) -> list[str]:
    """Returns the command that forwards ports of an existing connection, all on loopback.

    It prints a line for each port of `from_machine`: the port that the other machine has chosen for it.

    Args:
        socket: socket of the connection.
        to_machine: pairs of a port here and the port on the other machine to which it leads.
        from_machine: ports here, each of which a port of the other machine leads to.
    """
    assert socket is not None, "the connection is not the user's"
    there = [part for here, port in to_machine for part in ("-L", f"127.0.0.1:{here}:127.0.0.1:{port}")]
    back = [part for here in from_machine for part in ("-R", f"127.0.0.1:0:127.0.0.1:{here}")]
    # Without the user's configuration, whose own forwards would be requested as well. The host's name is not used.
    return ["ssh", "-F", "none", "-S", socket, "-O", "forward", *there, *back, "--", "host"]


def fastest_cipher(ciphers: Sequence[str]) -> list[str]:
    """Returns the option that prefers AES-GCM among the ciphers of the user's configuration, if it has any.

    Processors have instructions for it; OpenSSH's first choice takes twice the processor time for the same bytes.
    """
    by_speed = sorted(ciphers, key=lambda cipher: "-gcm@" not in cipher)
    return ["-o", f"Ciphers={','.join(by_speed)}"] if by_speed else []


def _of_settings(hop: Hop) -> list[str]:
    """Returns the options for the host's key and the user's keys."""
    settings, options = hop.settings, []
    if not settings.host_key_checking:
        options += ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "GlobalKnownHostsFile=/dev/null"]
    else:
        options.append("StrictHostKeyChecking=yes")
        if settings.known_hosts:
            options += [f"UserKnownHostsFile={_quoted(settings.known_hosts)}", "GlobalKnownHostsFile=/dev/null"]
        elif other_home():
            files = " ".join(map(_quoted, hop.options.known_hosts)) or "none"
            options.append(f"UserKnownHostsFile={files}")
    if settings.key_file:
        # An agent may hold more keys than a server allows to try.
        options += [f"IdentityFile={_quoted(settings.key_file)}", "IdentitiesOnly=yes"]
    elif other_home():
        options += [f"IdentityFile={_quoted(file)}" for file in hop.options.identity_files if os.path.exists(file)]
    return options


def _quoted(path: str) -> str:
    """Quotes a path for a configuration file, in which blanks end a path and `%` starts a token."""
    return '"' + path.replace("%", "%%").replace('"', '\\"') + '"'
