"""Why the `ssh` program did not reach a machine: the fault of the first one on the way that has one."""

from __future__ import annotations

import os
from collections.abc import Sequence

import paramiko

from autodist.cluster.known_hosts import find_known_keys
from autodist.cluster.ssh_errors import UnknownHostKeyError, why_no_connection
from autodist.cluster.ssh_hops import known_hosts_of
from autodist.cluster.ssh_keys import LoginRefusedError, UnusableKeyError, load_key
from autodist.cluster.ssh_program import Hop, log_of
from autodist.cluster.ssh_program_output import (
    OF_NO_CONNECTION,
    find_cause,
    is_logged_in,
    is_logging_in,
    unknown_cause,
    words_of,
)
from autodist.errors import ClusterError


def why_no_login(way: Sequence[Hop], folder: str, said: str, status: int | None) -> ClusterError:
    """The error for a login that was not done.

    Args:
        way: to the machine.
        folder: where those programs that reach the jump hosts have written what they said.
        said: by the one that reaches the machine itself.
        status: how that ended; None: it took too long.
    """
    for number in range(1, len(way)):
        words = _content(log_of(folder, number))
        hop = way[-number]
        cause = find_cause(words)
        if isinstance(cause, paramiko.ChannelException):
            return _explained(cause, way[-number - 1])
        if cause is not None and not is_logged_in(words):
            return _explained(cause, hop)
    hop = way[0]
    if status is None:
        late = TimeoutError("timed out")
        return _explained(paramiko.AuthenticationException("timeout") if is_logging_in(said) else late, hop)
    cause = find_cause(said)
    command = hop.options.proxy_command
    if isinstance(cause, EOFError | ConnectionError) and command and "Remote protocol version" not in said:
        cause = paramiko.ProxyCommandFailure(command, words_of(said, OF_NO_CONNECTION) or "it ended")
    return _explained(cause or unknown_cause(said, status), hop)


def _explained(cause: Exception, hop: Hop) -> ClusterError:
    """The error for a cause, with those of the user's keys that are locked and were not refused."""
    if isinstance(cause, LoginRefusedError):
        files = [hop.settings.key_file] if hop.settings.key_file else hop.options.identity_files
        locked = {key.file: key for key in _locked([file for file in files if file not in cause.offered])}
        others = (key for key in cause.unusable if key.file not in locked)
        cause = LoginRefusedError(cause.offered, (*locked.values(), *others), cause.takes)
    if isinstance(cause, UnknownHostKeyError):
        known = find_known_keys(known_hosts_of(hop.settings, hop.options), [hop.endpoint.key_name])
        cause = UnknownHostKeyError(cause.key, known.bad_lines)
    error = why_no_connection(cause, hop.endpoint)
    error.__cause__ = cause
    return error


def _locked(files: Sequence[str]) -> list[UnusableKeyError]:
    found = []
    for file in filter(os.path.exists, files):
        try:
            load_key(file)
        except UnusableKeyError as error:
            found += [error] if error.is_locked else []
    return found


def _content(file: str) -> str:
    try:
        with open(file, errors="replace", newline="") as opened:
            return opened.read().replace("\r\n", "\n")
    except OSError:
        return ""  # it had nothing to say
