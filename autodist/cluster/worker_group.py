"""The connections to all workers of a run except the chief."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from autodist.cluster.environments.start_rendezvous import channels_of_followers
from autodist.cluster.load_adjusted_clock import POLL_INTERVAL, Stopwatch, wait_for
from autodist.cluster.output import Output
from autodist.cluster.protocol import Facts, Inspect, Lost, Message, Progress, ProgressRequest
from autodist.cluster.transport import Channel, transport_to
from autodist.cluster.worker_connection import WorkerConnection
from autodist.resources import ResourceSpec, Worker

_log = logging.getLogger("autodist.cluster")

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

    Attributes:
        connections: in the order of the workers; complete when `open` is exhausted.
        output: prints the lines of the workers.
    """

    def __init__(
        self,
        spec: ResourceSpec,
        changed: threading.Condition,
        on_ending: Callable[[WorkerConnection], None],
        on_leaving: Callable[[str], None],
    ) -> None:
        self._spec, self._changed = spec, changed
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
        spec, others = self._spec, self._spec.workers[1:]
        if spec.is_given:
            yield others, channels_of_followers()
            return
        for node, group in itertools.groupby(others, key=lambda worker: worker.node):
            workers = list(group)
            options = ["--stop", str(spec.stop_timeout)]
            if spec.ssh_group(node) is not None:
                options += ["--silence", str(spec.silence_timeout)]
            yield workers, transport_to(spec, node, environment).open(len(workers), "autodist.cluster.agent", *options)

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
        if any(self._spec.ssh_group(worker.node) is not None for worker in self._spec.workers):
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
                is_away=True,
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
            log()
            limit -= _LOG_AFTER
        wait_for(self._changed, is_over, limit)

    def close(self) -> None:
        """Waits some seconds for all agents to end, and ends the local ones that remain."""
        stopwatch, limit = Stopwatch(), self._spec.stop_timeout + _STOP_LIMIT
        for connection in self.connections:
            while not connection.wait(POLL_INTERVAL) and stopwatch.read() < limit:
                pass
            connection.close()
