"""The agent: on a worker's machine, it starts the script, reports what becomes of it, and ends it.

`python -m autodist.cluster.agent [--remote]` speaks the messages of `protocol` on standard input and output. It ends
when its standard input does, when it is told to stop, or when the script has ended; nothing of the script is left then.
With `--remote`, where a cut link does not end standard input, silence ends it too. Neither TensorFlow nor anything else
heavy is imported here.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from importlib import metadata
from typing import BinaryIO

from autodist.cluster.launch import LaunchedScript
from autodist.cluster.ports import PortHeld, hold_port
from autodist.cluster.protocol import (
    HEARTBEAT_INTERVAL,
    SILENCE_LIMIT,
    Ask,
    Facts,
    Heartbeat,
    Inspect,
    Lost,
    Message,
    ProtocolError,
    Release,
    Start,
    Stop,
    decode,
    encode,
)
from autodist.cluster.silence import LOOK_INTERVAL, Silence
from autodist.versions import VERSION

_SILENT_CHIEF = (
    f"it heard nothing from the chief's machine for {SILENCE_LIMIT:.0f} s and ended its script; "
    "see whether the network is up, and whether processes of the run were stopped"
)


class Agent:
    """One conversation with the coordinator.

    Args:
        incoming: lines from the coordinator.
        outgoing: lines to the coordinator.
    """

    def __init__(self, incoming: BinaryIO, outgoing: BinaryIO) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._writing = threading.Lock()
        self._ended = threading.Event()
        self._silence = Silence()
        self._held: PortHeld | None = None
        self._script: LaunchedScript | None = None

    def serve(self, remote: bool) -> None:
        """Answers until there is nobody to answer or nothing left to report; then ends the script, if it still runs."""
        for work in (self._listen, self._beat) if remote else (self._listen,):
            threading.Thread(target=work, daemon=True).start()
        # Here and not where heartbeats are sent: sending blocks when the link is cut in the middle of much output.
        while not self._ended.wait(LOOK_INTERVAL):
            if remote and self._silence.is_too_long():
                # The link may come back, and the script's end is not the cause then. A link that is cut blocks.
                threading.Thread(target=self.send, args=(Lost(_SILENT_CHIEF),), daemon=True).start()
                break
        if self._script is not None:
            self._script.end()

    def send(self, message: Message) -> None:
        """Tells the coordinator something; when that is impossible, the agent ends."""
        try:
            with self._writing:
                self._outgoing.write(encode(message))
                self._outgoing.flush()
        except (OSError, ValueError):  # ValueError: the stream was closed
            self._ended.set()

    def _listen(self) -> None:
        try:
            for line in self._incoming:
                self._silence.heard()
                if not self._handle(decode(line)):
                    break
        except ProtocolError as error:
            self.send(
                Lost(
                    f"the agent of AutoDist {VERSION} there does not understand the chief's AutoDist "
                    f"({error}); install the chief's version there"
                )
            )
        except OSError as error:
            self.send(Lost(f"the agent failed: {error}"))
        finally:
            self._ended.set()

    def _handle(self, message: Message) -> bool:
        """Does what a message asks for, and says whether to go on."""
        match message:
            case Inspect():
                facts, self._held = find_facts(message)
                self.send(facts)
            case Start():
                self._start(message)
            case Release() | Ask() if self._script is not None:
                self._script.tell(message)
            case Stop():
                return False
        return True

    def _start(self, start: Start) -> None:
        assert self._held is not None, "Facts with a port come before Start"
        self._script = LaunchedScript(start, self._held, self.send, self._ended.set)

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_INTERVAL):
            self.send(Heartbeat())


def find_facts(inspect: Inspect) -> tuple[Facts, PortHeld | None]:
    """What this machine has to say, and the port that it holds for the worker's server."""
    problems, held = [], None
    try:
        held = hold_port(inspect.port)
    except OSError as error:
        problems.append(f"{error.strerror}; free it, or choose another `port` for the node")
    if not os.path.isdir(inspect.directory):
        problems.append(
            f"the directory {inspect.directory} is not there; make it, or share it with the chief's machine"
        )
    elif inspect.script is not None and not os.path.isfile(inspect.script):
        problems.append(f"the script {inspect.script} is not there; copy it there, or share its folder")
    port = None if held is None else held.port
    return Facts(platform.python_version(), tensorflow_version(), port, tuple(problems), VERSION), held


def tensorflow_version() -> str | None:
    """Its version, from the package's metadata: importing it would take seconds."""
    for name in ("tensorflow", "tensorflow-cpu", "tf-nightly"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def main() -> int:
    # Descriptors of its own: what anything else prints must not look like a message, and Python must not wait at its
    # end for the thread that reads.
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    Agent(incoming, outgoing).serve(remote="--remote" in sys.argv[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
