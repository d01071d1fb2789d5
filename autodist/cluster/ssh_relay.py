"""The SSH relay: a small process on the chief's machine that holds the SSH connection to the agents of one machine.

`python -m autodist.cluster.ssh_relay` reads one line from its standard input: the SSH settings, the command to start
and, for each copy of it, three descriptors. Then it forwards bytes from the first descriptor to the command, and from
the command's standard output and error to the others. It ends when all commands have ended. Both ends of the connection
send heartbeats, since a cut link does not close it: after the timeout it counts as lost, which the relay reports to the
coordinator.
"""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence

from autodist.cluster.heartbeat_timeout import HeartbeatTimeout
from autodist.cluster.protocol import Lost, encode
from autodist.cluster.ssh_errors import UnreachableError
from autodist.cluster.ssh_settings import SSHSettings
from autodist.cluster.ssh_transports import reach
from autodist.cluster.stream_relay import Ends, Relay
from autodist.errors import ClusterError

_POLL_INTERVAL, _GRACE = 1.0, 1.0


def _relay_all(
    settings: SSHSettings,
    module: Sequence[str],
    all_ends: Sequence[Ends],
    timeout: float,
    make_timeout: Callable[[], HeartbeatTimeout],
) -> None:
    """Starts a command for each of the chief's streams, one after another; returns when all have ended."""
    have_started = threading.Event()
    chief_gone = _poll_for_chief(all_ends)
    threading.Thread(
        target=_end_with_the_chief, name="autodist-relay-chief", args=(chief_gone, have_started), daemon=True
    ).start()
    with reach(settings, timeout, lambda seconds: _wait_while_needed(seconds, all_ends)) as machine:
        relays: list[threading.Thread] = []
        lost = None
        for ends in all_ends:
            if lost is None:
                try:
                    remote = machine.start(settings.command(*module), settings.preamble)
                except ClusterError as error:
                    lost = Lost(str(error), isinstance(error, UnreachableError))
                else:
                    run = Relay(settings.host, remote, ends, make_timeout()).run
                    relays.append(threading.Thread(target=run, name=f"autodist-relay-{len(relays)}"))
                    relays[-1].start()
                    continue
            ends.send(encode(lost))
            ends.close()
        have_started.set()
        for relay in relays:
            relay.join()


def _wait_while_needed(seconds: float, all_ends: Sequence[Ends]) -> bool:
    """Waits; returns False if the chief has ended."""
    return not _poll_for_chief(all_ends).poll(seconds * 1000)


def _poll_for_chief(all_ends: Sequence[Ends]) -> select.poll:
    gone = select.poll()
    for ends in all_ends:
        gone.register(ends.incoming, 0)  # `poll` always reports that the other end was closed
    return gone


def _end_with_the_chief(gone: select.poll, have_started: threading.Event) -> None:
    """Kills this process if the chief ends during a login, which may block for long."""
    while not have_started.is_set():
        if gone.poll(_POLL_INTERVAL * 1000) and not have_started.wait(_GRACE):
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    # The relay ends with the chief, which may save a checkpoint after SIGTERM was sent to all processes of its machine.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    order = json.loads(sys.stdin.readline() or "null")
    if order is None:
        return 0  # the chief has already ended
    limit, first = order["limits"]["silence_timeout"], order["limits"]["reach_timeout"]
    # The first message of an agent is late, since it has to load Python first, maybe from a network drive.
    make_timeout = functools.partial(HeartbeatTimeout, limit, patience=max(0.0, first - limit))
    all_ends = [Ends.of(*three) for three in order["channels"]]
    _relay_all(SSHSettings(**order["settings"]), order["module"], all_ends, limit, make_timeout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
