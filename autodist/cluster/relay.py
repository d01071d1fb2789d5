"""The relay: a process on the chief's machine that forwards bytes between the chief and commands on other machines.

`python -m autodist.cluster.relay ssh` starts the commands over SSH; `python -m autodist.cluster.relay rendezvous` waits
for processes that a scheduler has started. `python -m autodist.cluster.relay forwards` starts no command; it forwards
ports over SSH. All read their order, one message, from standard input. The chief's own
process may hold Python's global lock for longer than the heartbeat timeout (during a large `json.load`); without the
relay, the other machines would count the chief as lost. The relay ends when all commands, or the chief, have ended.
"""

from __future__ import annotations

import importlib
import signal
import sys

from autodist.cluster.protocol import decode, take_output
from autodist.cluster.stream_relay import ChiefStreams, RelayOrder, Relays

_SOURCES = {
    "ssh": "autodist.cluster.ssh_transports",
    "forwards": "autodist.cluster.ssh_forwards",
    "rendezvous": "autodist.cluster.environments.rendezvous_server",
}
"""The module that makes the connections, by the kind of relay. A relay imports only the one that it needs."""


def main() -> int:
    # The relay ends with the chief, which may save a checkpoint after SIGTERM was sent to all processes of its machine.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    source = importlib.import_module(_SOURCES[sys.argv[1]])
    line = sys.stdin.buffer.readline()
    if not line:
        return 0  # the chief has already ended
    order = decode(line)
    assert isinstance(order, RelayOrder), "the only message that the chief sends"
    source.relay(order, Relays([ChiefStreams.open(*three) for three in order.channels]), take_output())
    return 0


if __name__ == "__main__":
    sys.exit(main())
