"""What OpenSSH's `ssh` says when it fails, as the exceptions that other ways of SSH raise for the same."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import paramiko

from autodist.cluster.ssh_errors import (
    ChangedHostKeyError,
    HostKeyError,
    ProgramError,
    RevokedHostKeyError,
    UnknownHostKeyError,
)
from autodist.cluster.ssh_keys import LoginRefusedError, MoreThanKeyError, UnusableKeyError

DONE = "debug1: Entering interactive session."
"""That the login is done, and that others may join the connection."""

JOINED = ": master session id: "
"""That a command has joined a connection; what comes behind is the command's own."""

OF_NO_CONNECTION = (
    "kex_exchange_identification: ", "Connection closed by UNKNOWN", "banner exchange: Connection to UNKNOWN",
)  # fmt: skip
"""How lines begin of a program whose connection was to be another command, which has ended."""

_NOT_SAID = ("debug1: ", "Killed by signal", "OpenSSH_", "Transferred: ", "Bytes per second: ")
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
    """A server's key as `ssh` tells of it.

    Attributes:
        kind: as known_hosts has it.
        fingerprint: "SHA256:…".
    """

    kind: str
    fingerprint: str

    def get_name(self) -> str:
        """Its kind."""
        return self.kind


def find_cause(said: str) -> Exception | None:
    """The exception for what `ssh` says as it ends; None where it is not known.

    Args:
        said: all lines, those of LogLevel DEBUG1 among them.
    """
    for pattern, make in _CAUSES:
        found = pattern.search(said)
        if found:
            return make(found, said)
    return None


def unknown_cause(said: str, status: int | None) -> ProgramError:
    """The exception for what is not known: all that the program has said, but for its steps."""
    return ProgramError(status, words_of(said))


def words_of(said: str, besides: tuple[str, ...] = ()) -> str:
    """What is said, in one line, but for the program's steps.

    Args:
        said: all lines.
        besides: how other lines begin that are left out.
    """
    lines = [line for line in said.splitlines() if line.strip() and not line.startswith((*_NOT_SAID, *besides))]
    return "; ".join(line.strip() for line in lines)


def is_logged_in(said: str) -> bool:
    """Whether the server had let the user in."""
    return bool(re.search(r"^(debug1: Authentication succeeded|Authenticated to )", said, re.MULTILINE))


def is_logging_in(said: str) -> bool:
    """Whether it had come to keys."""
    return "debug1: Next authentication method:" in said


def _unresolved(found: re.Match[str], said: str) -> Exception:
    number = socket.EAI_AGAIN if "emporary" in found[1] else socket.EAI_NONAME
    return socket.gaierror(number, found[1])


def _unreachable(found: re.Match[str], said: str) -> Exception:
    last = re.findall(r"^ssh: connect to host .* port \d+: (.+)$", said, re.MULTILINE)[-1]
    return OSError(errno.ETIMEDOUT if "timed out" in last else _ERRNOS.get(last, errno.EIO), last)


def _key(kind: type[HostKeyError]) -> Callable[[re.Match[str], str], Exception]:
    def make(found: re.Match[str], said: str) -> Exception:
        shown = _SERVERS_KEY.search(said)
        return kind(ShownKey(shown[1], shown[2]) if shown else ShownKey("a key", "that was not told"))

    return make


def _slow_banner(found: re.Match[str], said: str) -> Exception:
    error = paramiko.SSHException("Error reading SSH protocol banner")
    error.__context__ = TimeoutError("timed out")
    return error


def _hung_up(found: re.Match[str], said: str) -> Exception:
    return ConnectionResetError(errno.ECONNRESET, found[1]) if "reset" in found[1] else EOFError(found[1])


def _behind_a_jump(found: re.Match[str], said: str) -> Exception:
    return paramiko.ChannelException(2, f"{found[1]}: {found[2]}")


def _no_session(found: re.Match[str], said: str) -> Exception:
    return paramiko.SSHException(found[1].strip())


def _refused(found: re.Match[str], said: str) -> Exception:
    methods = found[1].split(",")
    if _PARTLY.search(said):
        return MoreThanKeyError(methods)
    unusable = [UnusableKeyError(file, f"cannot be used ({reason})") for file, reason in _UNUSABLE.findall(said)]
    for file in _OPEN_TO_ALL.findall(said):
        unusable = [error for error in unusable if error.file != file]
        unusable.append(UnusableKeyError(file, f"may be read by others; run `chmod 600 {file}`"))
    # A key that the server would take, and no login yet: it could not sign.
    accepted = _ACCEPTED.findall(said)
    reasons = dict(_UNSIGNED.findall(said))
    for file in accepted:
        reason = reasons.get(file, "it is locked, or its device is not there")
        unusable.append(UnusableKeyError(file, f"is the right key, but could not be used: {reason}"))
    offered = [file for file in _OFFERED.findall(said) if file not in accepted]
    return LoginRefusedError(offered, unusable, methods)


def _too_many(found: re.Match[str], said: str) -> Exception:
    offered = _OFFERED.findall(said)
    tried = UnusableKeyError("the server", f"takes no more than {len(offered)} tries; give the right `key_file`")
    return LoginRefusedError(offered, [tried])


# The first that fits.
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
        # The other end was gone before it was greeted, not after.
        (r"^banner exchange: (Connection to .*: Broken pipe)$", _hung_up),
    ]
]
