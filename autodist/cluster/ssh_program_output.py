"""Converts the output of a failed `ssh` of OpenSSH to the exceptions that paramiko raises for the same cause."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import paramiko

from autodist.cluster.known_hosts import find_known_keys
from autodist.cluster.ssh_errors import (
    ChangedHostKeyError,
    HostKeyError,
    ProgramError,
    RevokedHostKeyError,
    UnknownHostKeyError,
    why_no_connection,
)
from autodist.cluster.ssh_keys import LoginRefusedError, MoreThanKeyError, UnusableKeyError, load_key
from autodist.cluster.ssh_program import log_of
from autodist.cluster.ssh_route import Hop
from autodist.errors import ClusterError

DONE = "debug1: Entering interactive session."
"""Line after the login, when commands may join the connection."""

JOINED = ": master session id: "
"""Part of the line after a command has joined a connection; further output is that of the command."""

OF_NO_CONNECTION = (
    "kex_exchange_identification: ", "Connection closed by UNKNOWN", "banner exchange: Connection to UNKNOWN",
)  # fmt: skip
"""Prefixes of lines of a program whose ProxyCommand has ended."""

_LOG_PREFIXES = ("debug1: ", "Killed by signal", "OpenSSH_", "Transferred: ", "Bytes per second: ")
_SERVERS_KEY = re.compile(r"^debug1: Server host key: (\S+) (\S+)", re.MULTILINE)
_OFFERED = re.compile(r"^debug1: Offering public key: (.*?) \S+ \S+:\S+", re.MULTILINE)
_ACCEPTED = re.compile(r"^debug1: Server accepts key: (.*?) \S+ \S+:\S+", re.MULTILINE)
_UNSIGNED = re.compile(r'^sign_and_send_pubkey: signing failed for \S+ "(.+?)"(?: from agent)?: (.+)$', re.MULTILINE)
_UNUSABLE = re.compile(r'^Load key "(.+)": (.+?)\.?$', re.MULTILINE)
_OPEN_TO_ALL = re.compile(r"^Permissions \d+ for '(.+)' are too open", re.MULTILINE)
_PARTLY = re.compile(r"^(debug1: )?Authenticated using .* with partial success", re.MULTILINE)
_ERRNOS = {os.strerror(number): number for number in errno.errorcode}


@dataclass(frozen=True)
class ShownKey:
    """A server's key in the output of `ssh`.

    Attributes:
        kind: type, as in known_hosts.
        fingerprint: "SHA256:…".
    """

    kind: str
    fingerprint: str

    def get_name(self) -> str:
        """Returns the type."""
        return self.kind


def find_cause(output: str) -> Exception | None:
    """Returns the exception for the output of a failed `ssh`; None if the output is unknown.

    Args:
        output: all lines, including those of LogLevel DEBUG1.
    """
    for pattern, make in _CAUSES:
        match = pattern.search(output)
        if match:
            return make(match, output)
    return None


def unknown_cause(output: str, status: int | None) -> ProgramError:
    """Returns the exception for unknown output; it quotes the output without log lines."""
    return ProgramError(status, text_of_output(output))


def text_of_output(output: str, omitted: tuple[str, ...] = ()) -> str:
    """Returns the output in one line, without log lines.

    Args:
        output: all lines.
        omitted: prefixes of other lines to omit.
    """
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith((*_LOG_PREFIXES, *omitted))]
    return "; ".join(line.strip() for line in lines)


def is_logged_in(output: str) -> bool:
    """Returns True if the login had succeeded."""
    return bool(re.search(r"^(debug1: Authentication succeeded|Authenticated to )", output, re.MULTILINE))


def is_logging_in(output: str) -> bool:
    """Returns True if the login had reached authentication."""
    return "debug1: Next authentication method:" in output


def _unresolved(match: re.Match[str], output: str) -> Exception:
    number = socket.EAI_AGAIN if "emporary" in match[1] else socket.EAI_NONAME
    return socket.gaierror(number, match[1])


def _unreachable(match: re.Match[str], output: str) -> Exception:
    last = re.findall(r"^ssh: connect to host .* port \d+: (.+)$", output, re.MULTILINE)[-1]
    return OSError(errno.ETIMEDOUT if "timed out" in last else _ERRNOS.get(last, errno.EIO), last)


def _key(kind: type[HostKeyError]) -> Callable[[re.Match[str], str], Exception]:
    def make(match: re.Match[str], output: str) -> Exception:
        key = _SERVERS_KEY.search(output)
        return kind(ShownKey(key[1], key[2]) if key else ShownKey("a key", "that was not logged"))

    return make


def _slow_banner(match: re.Match[str], output: str) -> Exception:
    error = paramiko.SSHException("Error reading SSH protocol banner")
    error.__context__ = TimeoutError("timed out")
    return error


def _hung_up(match: re.Match[str], output: str) -> Exception:
    return ConnectionResetError(errno.ECONNRESET, match[1]) if "reset" in match[1] else EOFError(match[1])


def _behind_a_jump(match: re.Match[str], output: str) -> Exception:
    return paramiko.ChannelException(2, f"{match[1]}: {match[2]}")


def _no_session(match: re.Match[str], output: str) -> Exception:
    return paramiko.SSHException(match[1].strip())


def _refused(match: re.Match[str], output: str) -> Exception:
    methods = match[1].split(",")
    if _PARTLY.search(output):
        return MoreThanKeyError(methods)
    unusable = [UnusableKeyError(file, f"cannot be used ({reason})") for file, reason in _UNUSABLE.findall(output)]
    for file in _OPEN_TO_ALL.findall(output):
        unusable = [error for error in unusable if error.file != file]
        unusable.append(UnusableKeyError(file, f"may be read by others; run `chmod 600 {file}`"))
    # If the server accepts a key and the login fails, the key could not sign.
    accepted = _ACCEPTED.findall(output)
    reasons = dict(_UNSIGNED.findall(output))
    for file in accepted:
        reason = reasons.get(file, "it is locked, or its device is missing")
        unusable.append(UnusableKeyError(file, f"is the right key, but could not be used: {reason}"))
    offered = [file for file in _OFFERED.findall(output) if file not in accepted]
    return LoginRefusedError(offered, unusable, methods)


def _too_many(match: re.Match[str], output: str) -> Exception:
    offered = _OFFERED.findall(output)
    error = UnusableKeyError("the server", f"accepts no more than {len(offered)} attempts; set the right `key_file`")
    return LoginRefusedError(offered, [error])


# The first pattern that matches applies.
_CAUSES: Sequence[tuple[re.Pattern[str], Callable[[re.Match[str], str], Exception]]] = [
    (re.compile(pattern, re.MULTILINE), make)
    for pattern, make in [
        (r"^ssh: Could not resolve hostname .*?: (.+)$", _unresolved),
        (r"^ssh: connect to host .* port \d+: (.+)$", _unreachable),
        (r"REVOKED HOST KEY DETECTED|^Host key .*is revoked|marked as revoked", _key(RevokedHostKeyError)),
        (r"REMOTE HOST IDENTIFICATION HAS CHANGED", _key(ChangedHostKeyError)),
        (r"^No \S+ host key is known for", _key(UnknownHostKeyError)),
        (r"^Host key verification failed", _key(UnknownHostKeyError)),
        (r"^Connection timed out during banner exchange", _slow_banner),
        (r"Too many authentication failures", _too_many),
        (r"Permission denied \(([^)]*)\)\.?\s*$", _refused),
        (r"^(Unable to negotiate .*)$", _no_session),
        (r"^(?:kex_exchange_identification|banner exchange): (.*invalid.*)$", _no_session),
        (r"^ssh_dispatch_run_fatal: (.*)$", _no_session),
        (r"^channel \d+: open failed: (.*?): (.*)$", _behind_a_jump),
        (r"^kex_exchange_identification: (.*)$", _hung_up),
        (r"^(Connection (?:closed|reset) by .*)$", _hung_up),
        # The other end was gone before `ssh` sent its banner.
        (r"^banner exchange: (Connection to .*: Broken pipe)$", _hung_up),
    ]
]


def why_no_login(route: Sequence[Hop], folder: str, output: str, status: int | None) -> ClusterError:
    """Returns the error for a failed login.

    Args:
        route: the machine, then its jump hosts, as `find_route` returns them.
        folder: folder with the output of the programs that connect to the jump hosts.
        output: output of the program that connects to the machine.
        status: exit status of that program; None if it took too long.
    """
    for number in range(1, len(route)):
        log = _content(log_of(folder, number))
        hop = route[-number]
        cause = find_cause(log)
        if isinstance(cause, paramiko.ChannelException):
            return _explained(cause, route[-number - 1])
        if cause is not None and not is_logged_in(log):
            return _explained(cause, hop)
    hop = route[0]
    if status is None:
        late = TimeoutError("timed out")
        return _explained(paramiko.AuthenticationException("timeout") if is_logging_in(output) else late, hop)
    cause = find_cause(output)
    command = hop.options.proxy_command
    if isinstance(cause, EOFError | ConnectionError) and command and "Remote protocol version" not in output:
        cause = paramiko.ProxyCommandFailure(command, text_of_output(output, OF_NO_CONNECTION) or "it ended")
    return _explained(cause or unknown_cause(output, status), hop)


def _explained(cause: Exception, hop: Hop) -> ClusterError:
    """Returns the error for a cause; adds the user's locked keys that were not refused."""
    if isinstance(cause, LoginRefusedError):
        locked = {key.file: key for key in _locked([file for file in hop.key_files if file not in cause.offered])}
        others = (key for key in cause.unusable if key.file not in locked)
        cause = LoginRefusedError(cause.offered, (*locked.values(), *others), cause.takes)
    if isinstance(cause, UnknownHostKeyError):
        known = find_known_keys(hop.known_hosts, [hop.endpoint.key_name])
        cause = UnknownHostKeyError(cause.key, known.bad_lines)
    error = why_no_connection(cause, hop.endpoint)
    error.__cause__ = cause
    return error


def _locked(files: Sequence[str]) -> list[UnusableKeyError]:
    errors = []
    for file in filter(os.path.exists, files):
        try:
            load_key(file)
        except UnusableKeyError as error:
            errors += [error] if error.is_locked else []
    return errors


def _content(file: str) -> str:
    try:
        with open(file, errors="replace", newline="") as opened:
            return opened.read().replace("\r\n", "\n")
    except OSError:
        return ""  # the program has written nothing
