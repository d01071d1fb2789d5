"""The connections to the workers of a run: WorkerConnection represents one worker, and WorkerGroup all of them."""

from __future__ import annotations

import collections
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from autodist.cluster.agent_connection import AgentConnection
from autodist.cluster.environments.start_rendezvous import channels_of_followers
from autodist.cluster.failure import LAST_LINES, Ending, exit_reason
from autodist.cluster.output import Output
from autodist.cluster.protocol import (
    Done,
    Exited,
    Facts,
    Inspect,
    Joined,
    Leaving,
    Line,
    Lost,
    Message,
    Progress,
    ProgressRequest,
)
from autodist.cluster.timeouts import POLL_INTERVAL, Stopwatch, wait_for
from autodist.cluster.transport import Channel, open_channels
from autodist.logs.tensorflow_log import is_no_failure, is_routine_line
from autodist.resources import ResourceSpec, Worker
from autodist.waits import Condition

_log = logging.getLogger("autodist.cluster")


class WorkerConnection(AgentConnection):
    """The channel to one worker's agent, and the state of the worker.

    All attributes change under `changed`, which is then notified.

    Args:
        name: name of the worker.
        channel: channel to its agent.
        changed: condition shared by all connections of a run.
        output: destination of its lines.
        on_end: called under `changed`, once, when the worker has ended.
        on_leaving: called with the worker's name when it received SIGTERM, from a thread of the connection.
        shows: True if its lines are printed; a scheduler that has started the worker collects them itself.

    Attributes:
        answer: answer to `Inspect`; None until it arrives.
        joined: True if the script has joined the run.
        done: True if the script has reported that it is done.
        is_released: True if its process may end before those of the other workers.
        progress: answer to the last `ProgressRequest`; None until it arrives.
        ending: end of the worker; None while it runs.
        is_leaving: True if the worker received SIGTERM.
        status: exit status of the script, if it is known.
    """

    def __init__(
        self,
        name: str,
        channel: Channel,
        changed: Condition,
        output: Output,
        on_end: Callable[[WorkerConnection], None],
        on_leaving: Callable[[str], None],
        shows: bool = True,
    ) -> None:
        self.name = name
        self.answer: Facts | Lost | None = None
        self.joined = self.done = self.is_released = self.is_leaving = False
        self.progress: Progress | None = None
        self.ending: Ending | None = None
        self.status: int | None = None
        self._changed, self._output, self._on_end, self._on_leaving = changed, output, on_end, on_leaving
        self._shows = shows
        self._has_sent = True
        self._lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        super().__init__(name, channel)

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines that the worker printed, without TensorFlow's unrelated log lines."""
        return tuple(self._lines)

    def take_senders(self) -> bool:
        """Returns True if the agent has sent something since the last call, or sends no heartbeats."""
        has_sent, self._has_sent = self._has_sent, not self._channel.sends_heartbeats
        return has_sent

    def _handle(self, message: Message) -> None:
        self._has_sent = True
        if isinstance(message, Line):
            if is_routine_line(message.text) and not _log.isEnabledFor(logging.DEBUG):
                return
            if self._shows:
                self._output.line(message.stream, self.name, message.text)
        with self._changed:
            is_new = isinstance(message, Leaving) and not self.is_leaving
            self._note(message)
            self._changed.notify_all()
        if is_new:
            self._on_leaving(self.name)

    def _note(self, message: Message) -> None:
        match message:
            case Line():
                if not is_no_failure(message.text):
                    self._lines.append(message.text)
            case Facts():
                self.answer = message
            case Joined():
                self.joined = True
            case Leaving():
                self.is_leaving = True
            case Done():
                self.done = True
            case Progress():
                self.progress = message
            case Exited():
                self.status = message.status
                self._end(message)
            case Lost():
                self._end(message)

    def _lost(self, output: str) -> Lost:
        if output or self._shows:
            return super()._lost(output)
        problem = "its process ended without a report: it was killed (`dmesg` there shows whether memory ran out)"
        return Lost(problem, is_away=True)

    def _end(self, message: Exited | Lost) -> None:
        if self.ending is not None:
            return
        if isinstance(message, Exited):
            reason = message.reason or exit_reason(message.status, self.joined, self.done)
            self.ending = Ending(self.name, reason, self.last_lines)
        else:
            self.answer = self.answer or message
            self.ending = Ending(self.name, f"was lost: {message.problem}", self.last_lines, is_lost=True)
        self._on_end(self)


# Seconds after which the log names the workers that the run waits for.
_LOG_AFTER = 5.0

# Seconds in addition to `stop_timeout` until an agent counts as stuck.
_STOP_LIMIT = 3.0


class WorkerGroup:
    """Starts the agents of all workers except the chief, exchanges messages with them, and waits for them.

    Args:
        spec: the machines.
        changed: condition that guards the connections.
        on_ending: called under `changed`, once for each worker, when it has ended.
        on_leaving: called with the name of each worker that received SIGTERM, once, from a thread of its connection.
        workers: the workers, node by node; None: all except the chief.
        logs: True to log the workers that the run waits for.

    Attributes:
        connections: in the order of the workers; complete when `open` is exhausted.
        output: prints the lines of the workers.
    """

    def __init__(
        self,
        spec: ResourceSpec,
        changed: Condition,
        on_ending: Callable[[WorkerConnection], None],
        on_leaving: Callable[[str], None],
        workers: Sequence[Worker] | None = None,
        logs: bool = True,
    ) -> None:
        self._spec, self._changed, self._logs = spec, changed, logs
        self._workers = spec.workers[1:] if workers is None else workers
        self._on_ending, self._on_leaving = on_ending, on_leaving
        self.connections: tuple[WorkerConnection, ...] = ()
        self.output = Output()

    def open(self, environment: Mapping[str, str] | None) -> Iterator[None]:
        """Connects to the agents, node by node: the agents of a node are started when the iterator reaches it.

        Args:
            environment: environment variables of programs started on this machine; None for those of this process.
        """
        for workers, channels in self._channels(environment):
            with self._changed:
                self.connections += tuple(
                    WorkerConnection(
                        worker.name, channel, self._changed, self.output, self._on_ending, self._on_leaving,
                        shows=not self._spec.is_given,
                    )
                    for worker, channel in zip(workers, channels, strict=True)
                )  # fmt: skip
            yield

    def _channels(self, environment: Mapping[str, str] | None) -> Iterator[tuple[Sequence[Worker], Sequence[Channel]]]:
        """Yields workers, and a channel to each worker's agent, which AutoDist or a scheduler has started."""
        spec, others = self._spec, self._workers
        if spec.is_given:
            yield others, channels_of_followers()
            return
        for node, group in itertools.groupby(others, key=lambda worker: worker.node):
            workers = list(group)
            agent = ("autodist.cluster.agent", "--stop", str(spec.stop_timeout))
            yield workers, open_channels(spec, node, len(workers), *agent, environment=environment)

    def send(self, *messages: Message) -> None:
        """Sends messages to every worker."""
        for connection in self.connections:
            for message in messages:
                connection.send(message)

    def request_facts(self, requests: Sequence[Inspect]) -> None:
        """Requests the facts of each worker's machine."""
        for connection, request in zip(self.connections, requests, strict=True):
            connection.send(request)

    def wait_for_facts(self, is_stopped: Callable[[], bool]) -> dict[str, Facts | Lost]:
        """Returns the answer of each worker's agent by the worker's name; logs the late ones once if it takes long."""
        limit = self._spec.reach_timeout
        if any(self._spec.ssh_group(worker.node) is not None for worker in self._workers):
            limit += self._spec.connect_timeout  # the machine may be booting

        def late() -> list[str]:
            return [connection.name for connection in self.connections if not connection.answer]

        with self._changed:
            self._wait(
                lambda: not late() or is_stopped(), limit,
                lambda: _log.info(
                    "%s: no answer yet; waiting for up to %g s, in case the machine is still booting",
                    ", ".join(late()), limit,
                ),
            )  # fmt: skip
            lost = Lost(
                f"no answer within {limit:g} s; check that the machine is up and not overloaded, or raise "
                "`reach_timeout`",
                is_away=not self._spec.is_elastic,  # a process of an elastic run that has not left is there
            )
            return {connection.name: connection.answer or lost for connection in self.connections}

    def request_progress(
        self, limit: float, are_starting: bool, is_over: Callable[[], bool]
    ) -> dict[str, Progress | None]:
        """Returns the progress of every worker's script; None for a worker that has not answered within `limit`."""
        with self._changed:
            for connection in self.connections:
                connection.progress = None
        self.send(ProgressRequest(are_starting))
        with self._changed:
            self._changed.wait_for(
                lambda: is_over() or all(connection.progress for connection in self.connections), limit
            )
            return {connection.name: connection.progress for connection in self.connections}

    def wait_for_processes(self) -> list[str]:
        """Waits until the processes of released workers have ended; returns the names of those still running."""

        def late() -> list[str]:
            return [connection.name for connection in self.connections if not connection.ending]

        limit = self._spec.end_timeout
        with self._changed:
            self._wait(
                lambda: not late(), limit,
                lambda: _log.info(
                    "%s: the script is done, its process (exit handlers, threads) is not; waiting for up to %g s.",
                    ", ".join(late()), limit,
                ),
            )  # fmt: skip
            return late()

    def _wait(self, is_over: Callable[[], bool], limit: float, log: Callable[[], None]) -> None:
        """Waits for a condition, up to `limit` seconds; calls `log` once if that takes long."""
        if limit > _LOG_AFTER and not wait_for(self._changed, is_over, _LOG_AFTER):
            if self._logs:
                log()
            limit -= _LOG_AFTER
        wait_for(self._changed, is_over, limit)

    def close(self, limit: float | None = None) -> None:
        """Waits for all agents to end, and ends the local ones that remain.

        Args:
            limit: seconds to wait; None: `stop_timeout`, and some more.
        """
        stopwatch, limit = Stopwatch(), self._spec.stop_timeout + _STOP_LIMIT if limit is None else limit
        for connection in self.connections:
            while not connection.wait(POLL_INTERVAL) and stopwatch.read() < limit:
                pass
            connection.close()
