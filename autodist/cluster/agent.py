"""The agent: starts the script on a worker's machine, reports its progress and exit to the coordinator, and ends it.

`python -m autodist.cluster.agent --stop SECONDS [--silence SECONDS]` exchanges the messages of `protocol` on standard
input and output. The agent ends when its standard input closes, when it receives `Stop`, or when the script has ended.
No process of the script is left then. `--silence` is for networks: a cut link does not close standard input, so the
agent also ends after so many seconds without a message. `--stop` is the time that a script has to end after SIGTERM.
This module imports neither TensorFlow nor any other large package.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from importlib import metadata
from types import FrameType
from typing import BinaryIO, Protocol

from autodist.cluster.addresses import unresolved
from autodist.cluster.firewall import FirewallError, why_not_permitted
from autodist.cluster.hardware import interface_addresses
from autodist.cluster.launch import LaunchedScript
from autodist.cluster.ports import ReservedPort, is_open_to_others, reserve_port
from autodist.cluster.preemption_notice import PreemptionNotice
from autodist.cluster.protocol import (
    ChiefText,
    ChiefWaits,
    Doing,
    Facts,
    Heartbeat,
    Inspect,
    Leaving,
    Lost,
    Membership,
    Message,
    Progress,
    ProgressRequest,
    ProtocolError,
    Release,
    Start,
    Stop,
    decode,
    encode,
    take_output,
)
from autodist.cluster.start import content_digest
from autodist.cluster.timeouts import HeartbeatTimeout, heartbeat_interval
from autodist.errors import ClusterError
from autodist.versions import VERSION
from autodist.waits import Event, start_thread

_INPUT_CONSUMED_BY_LOGIN = (
    "the agent there did not receive the chief's messages completely (it received {!r}): a program that the login "
    "there runs (a start file of its shell, a `ForceCommand`) reads standard input; let it do so on terminals alone"
)


class RunningScript(Protocol):
    """A script, or a function, that an agent runs."""

    began: float
    """Time of the start, by `time.monotonic`."""

    def send_to_script(self, message: Message) -> None:
        """Sends a message to its worker client."""
        ...

    def is_stopped(self) -> bool:
        """Returns True if its process is stopped."""
        ...

    def end(self) -> None:
        """Ends it if it still runs."""
        ...


class Agent:
    """The agent's connection to the coordinator, and the script that it runs.

    Args:
        incoming: lines from the coordinator.
        outgoing: lines to the coordinator.
        stop_timeout: seconds between SIGTERM and SIGKILL for the script.
        silence_timeout: seconds without a message after which the chief counts as gone; None if the end of the chief
            closes standard input.
    """

    def __init__(
        self, incoming: BinaryIO, outgoing: BinaryIO, stop_timeout: float, silence_timeout: float | None = None
    ) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._writing = threading.Lock()
        self._ended = Event()
        self._stop_timeout = stop_timeout
        self._timeout = None if silence_timeout is None else HeartbeatTimeout(silence_timeout)
        self._reserved_port: ReservedPort | None = None
        self._script: RunningScript | None = None
        self._listener = threading.Thread(target=self._listen, name="autodist-agent", daemon=True)
        self._heartbeat: threading.Thread | None = None
        self._on_preempt = self._is_leaving = False
        self._notice = PreemptionNotice()

    def serve(self) -> None:
        """Handles messages until the connection or the script has ended; then ends the script if it still runs."""
        self._listener.start()
        if self._timeout is None:
            self._ended.wait()
        else:
            self._wait_for_timeout(self._timeout)
        if self._script is not None:
            self._script.end()

    def leave(self) -> bool:
        """Reports SIGTERM to the chief, once; returns False if the chief does not save then, or for a second one."""
        if not self._on_preempt or not self._notice.includes_this():
            return False
        if not self._is_leaving:
            self._is_leaving = True
            start_thread("leaving", self.send, Leaving())
        return True

    def _wait_for_timeout(self, timeout: HeartbeatTimeout) -> None:
        """Returns when the connection has ended, or no message arrived within the timeout."""
        interval = heartbeat_interval(timeout.limit)
        self._heartbeat = start_thread("heartbeat", self._send_heartbeats, interval)
        # Checked here and not in `_send_heartbeats`: sending blocks if the link is cut in the middle of much output.
        while not self._ended.wait(timeout.poll_interval):
            if timeout.has_expired():
                problem = (
                    f"it received nothing from the chief's machine for {timeout.limit:g} s and ended its script; check "
                    "that the network is up and that no process of the run was stopped; if the network pauses for "
                    "longer, raise `silence_timeout`"
                )
                # The link may come back; then this message is the cause of the script's end. In a thread, since
                # writing to a cut link blocks.
                start_thread("lost", self.send, Lost(problem))
                return

    def send(self, message: Message) -> None:
        """Sends a message to the coordinator; if that is impossible, the agent ends."""
        try:
            with self._writing:
                self._outgoing.write(encode(message))
                self._outgoing.flush()
        except (OSError, ValueError):  # ValueError: the stream was closed
            self._ended.set()

    def _listen(self) -> None:
        line = b""
        try:
            for line in self._incoming:
                if self._timeout is not None:
                    self._timeout.restart()
                if not self._handle(decode(line)):
                    break
        except ProtocolError as error:
            if not line.startswith(b"{"):  # no version of AutoDist sends such a line
                self.send(Lost(_INPUT_CONSUMED_BY_LOGIN.format(line[:80])))
                return
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
        """Handles one message; returns False if the agent has to stop."""
        match message:
            case Inspect():
                facts, self._reserved_port = find_facts(message)
                self.send(facts)
            case Start():
                self._start(message)
            case ProgressRequest(is_starting=True) if self._script is not None:
                self._answer_for(self._script)
            case Membership() | Release() | ProgressRequest() | ChiefText() | ChiefWaits() if self._script is not None:
                self._script.send_to_script(message)
            case Stop():
                return False
        return True

    def _start(self, start: Start) -> None:
        assert self._reserved_port is not None, "Facts with a port come before Start"
        try:
            _require_loopback(start.forwarded)
            self._script = LaunchedScript(
                start, self._reserved_port, self._stop_timeout, self.send, self._on_script_end
            )
        except ClusterError as error:
            self.send(Lost(str(error)))
            self._ended.set()
        self._on_preempt = start.membership.on_preempt

    def _on_script_end(self) -> None:
        """Called from a thread when the script has ended and this was sent to the coordinator."""
        self._ended.set()

    def _answer_for(self, script: RunningScript) -> None:
        if not script.is_stopped():
            self.send(Progress.of_this_process(Doing.ELSE, script.began))

    def _send_heartbeats(self, interval: float) -> None:
        while not self._ended.wait(interval):
            self.send(Heartbeat())


def _require_loopback(ports: Iterable[int]) -> None:
    """Checks that the SSH server listens for forwards on the loopback interface alone, as the chief requests.

    Raises:
        ClusterError: others could reach the servers of other machines through this machine.
    """
    if any(map(is_open_to_others, ports)):
        raise ClusterError(
            "its SSH server opens forwarded ports to other machines (`GatewayPorts yes`), so they would reach "
            "the workers' servers; set `GatewayPorts no` in its sshd_config, or remove `encrypt`"
        )


def find_facts(inspect: Inspect) -> tuple[Facts, ReservedPort | None]:
    """Returns this machine's versions and problems for the script, and the port reserved for the worker's server."""
    problems, reserved_port = [], None
    try:
        reserved_port = reserve_port(inspect.port)
    except OSError as error:
        problems.append(f"{error.strerror}; free it, or choose another `port` for the node")
    if not os.path.isdir(inspect.directory):
        problems.append(
            f"the directory {inspect.directory} is not there; create it, or share it with the chief's machine"
        )
    elif inspect.script is not None and not os.path.isfile(inspect.script):
        problems.append(f"the script {inspect.script} is not there; copy it there, or share its folder")
    no_firewall = None
    if inspect.sets_firewall:
        try:
            no_firewall = why_not_permitted()
        except FirewallError as error:
            problems.append(str(error))
    port = None if reserved_port is None else reserved_port.port
    facts = Facts(
        platform.python_version(),
        tensorflow_version(),
        port,
        tuple(problems),
        VERSION,
        installed_versions(inspect.packages),
        inspect.script and content_digest(inspect.script),
        unresolved(inspect.hosts),
        tuple(address.partition("/")[0] for _, address in interface_addresses()),
        no_firewall,
    )
    return facts, reserved_port


def find_own_facts(inspect: Inspect) -> Facts:
    """Returns the facts of the chief's machine, with which those of other machines are compared; reserves no port."""
    facts, reserved_port = find_facts(replace(inspect, hosts=(), sets_firewall=False))
    if reserved_port is not None:
        reserved_port.release()
    return facts


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Returns the versions of the packages that are installed, from their metadata: importing them takes seconds."""
    return {name: version for name in packages if (version := _version(name)) is not None}


def tensorflow_version() -> str | None:
    """Returns TensorFlow's version, under any of its package names; None if it is not installed."""
    return next(filter(None, map(_version, ("tensorflow", "tensorflow-cpu", "tf-nightly"))), None)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def take_streams() -> tuple[BinaryIO, BinaryIO]:
    """Returns standard input and output for messages; further output goes to standard error.

    The input is a duplicate, so that Python does not wait at its exit for the thread that reads. The output begins with
    an empty line: a start file of the login may have printed text without a line ending.
    """
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), take_output()
    with contextlib.suppress(OSError):  # nobody reads any more
        outgoing.write(b"\n")
        outgoing.flush()
    return incoming, outgoing


def main() -> int:
    incoming, outgoing = take_streams()
    options = argparse.ArgumentParser()
    options.add_argument("--stop", type=float, default=3.0)
    options.add_argument("--silence", type=float)
    limits, _ = options.parse_known_args()  # a chief of another version, which is reported later, may pass more options
    agent = Agent(incoming, outgoing, limits.stop, limits.silence)

    def leave_or_end(number: int, frame: FrameType | None) -> None:
        if not agent.leave():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)  # the guard ends the script then

    signal.signal(signal.SIGTERM, leave_or_end)
    agent.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
