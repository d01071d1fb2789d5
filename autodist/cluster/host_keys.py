"""Whether a server's host key is the one that is known."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event
from typing import Any

import paramiko

from autodist.cluster.known_hosts import KnownKeys, find_known_keys
from autodist.cluster.ssh_errors import ChangedHostKeyError, Endpoint, RevokedHostKeyError, UnknownHostKeyError


class HostKeys(paramiko.MissingHostKeyPolicy):
    """Judges the key that a server shows, in place of paramiko's own reader of known_hosts files.

    Args:
        endpoint: the server.
        files: of known host keys.
        checks: whether a host whose key is not known is refused.
    """

    def __init__(self, endpoint: Endpoint, files: Sequence[str], checks: bool) -> None:
        # As OpenSSH does, a key that is known without a port counts for any, where none is known with it.
        names = [endpoint.key_name] if endpoint.alias else [endpoint.key_name, endpoint.host]
        self._known = find_known_keys(files, names) if checks else KnownKeys({})
        self._checks = checks

    def transport(self, sock: Any, **options: Any) -> paramiko.Transport:
        """What the connection runs on; the server is asked for a kind of key that is known, if one is."""
        made = _Transport(sock, **options)
        security, kinds = made.get_security_options(), set(self._known.kinds.values())
        security.key_types = sorted(security.key_types, key=lambda name: _kind_of(name) not in kinds)
        return made

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        shown = key.asbytes()
        if not self._checks or (shown in self._known.kinds and shown not in self._known.revoked):
            return
        if shown in self._known.revoked:
            raise RevokedHostKeyError(key)
        if self._known.kinds:
            raise ChangedHostKeyError(key)
        raise UnknownHostKeyError(key, self._known.bad_lines)


class _Transport(paramiko.Transport):
    """Waits for the server's greeting, and then for its key, for up to `banner_timeout` each.

    A client's `connect` waits for both no longer than it does for the port, and by a clock that may be set.
    """

    def start_client(self, event: Event | None = None, timeout: float | None = None) -> None:
        self.handshake_timeout = self.banner_timeout
        super().start_client(event)


def _kind_of(algorithm: str) -> str:
    """The type of the keys that a signature algorithm is for."""
    return "ssh-rsa" if algorithm.startswith("rsa-sha2-") else algorithm
