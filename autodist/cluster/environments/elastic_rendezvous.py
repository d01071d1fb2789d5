"""The rendezvous of an elastic run: it starts with a part of the processes, and others may come while it trains."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Collection, MutableMapping
from dataclasses import replace

from autodist.cluster.environments.handshake import Hello
from autodist.cluster.environments.launcher_env import GivenCluster
from autodist.cluster.environments.machines import Machines, machines_of
from autodist.cluster.environments.quorum import Quorum
from autodist.cluster.environments.rendezvous import Rendezvous
from autodist.cluster.environments.roster import Arrival, ProcessJoined, ProcessLeft, RendezvousOrder
from autodist.cluster.environments.standby import StandbyProcess
from autodist.cluster.protocol import Message
from autodist.cluster.script import Script
from autodist.cluster.transport import Channel
from autodist.resources import Timeouts

_log = logging.getLogger("autodist.cluster")


class ElasticRendezvous(Rendezvous):
    """A rendezvous that waits for a quorum, and whose server accepts further processes until the end of the start.

    Args:
        given: this process's cluster; its count is that of the processes that may come.
        limits: time limits.
        environment: environment of this process; the secret is removed from it.
        quorum: the part of the processes that suffices.

    Raises:
        ResourceSpecError: there is no secret.
    """

    def __init__(
        self, given: GivenCluster, limits: Timeouts, environment: MutableMapping[str, str], quorum: Quorum
    ) -> None:
        super().__init__(given, limits, environment)
        self._quorum = quorum
        self._enough_since: float | None = None
        self._changed = threading.Lock()  # guards `_arrivals` and the fields below, once the run has started
        self._channel_of: dict[int, int] = {}
        self._standby: dict[int, StandbyProcess] = {}
        self._standby_ever: list[StandbyProcess] = []
        self._member_channels: dict[int, int] = {}
        self._members: tuple[Arrival, ...] | None = None
        self._expected: tuple[int, ...] | None = None

    @property
    def channels(self) -> tuple[Channel, ...]:
        return tuple(self._channels[self._member_channels[process]] for process in self.machines.processes[1:])

    @property
    def expected(self) -> tuple[int, ...]:
        """Indices of the processes, except the chief, that are there, or were there when this start ended."""
        with self._changed:
            return tuple(sorted(self._arrivals)) if self._expected is None else self._expected

    def count_workers(self, processes: Collection[int]) -> int:
        """Returns the number of workers of a start with some of the processes and the chief; all, if too few."""
        with self._changed:
            arrivals = [arrival for index, arrival in self._arrivals.items() if index in processes]
        chosen = self._quorum.choose(self._own, arrivals, self._replicas)
        return 1 + len(arrivals if chosen is None else chosen)

    def find_joining(self, script: Script, limit: float) -> tuple[tuple[Arrival, ...], int]:
        """Checks the standby processes; returns those with which the run can grow, and its workers with them.

        A process that the run cannot use is refused, with a warning.

        Args:
            script: the script of the run.
            limit: seconds to wait for the facts of each process's machine.
        """
        with self._changed:
            standby, members = list(self._standby.values()), self._members or ()
        ready = [process.arrival for process in standby if process.is_ready(script, limit)]
        for process in standby:
            if process.refused is not None:
                self._refuse(process)
        chosen = self._quorum.choose(self._own, [*members, *ready], self._replicas) if ready else None
        if chosen is None or len(chosen) <= len(members):
            return (), len(members) + 1
        return tuple(arrival for arrival in chosen if arrival not in members), len(chosen) + 1

    def dismiss(self, starts_again: bool, failure: str = "") -> None:
        """Accepts no more processes, and dismisses those on standby; the server ends once the workers have left.

        Args:
            starts_again: True if the processes are to join the next start.
            failure: the reason why the run ends; empty if it ends well.
        """
        with self._changed:
            if self._expected is not None:
                return
            self._expected = tuple(sorted(self._arrivals))
            standby = list(self._standby.values())
        for process in standby:
            process.dismiss(starts_again, failure)
        used = {*self._member_channels.values()}
        for number, channel in enumerate(self._channels):
            if number not in used:
                with contextlib.suppress(OSError):  # the process has ended
                    channel.stdin.close()
        super()._forget_secret()

    def close(self, reason: str) -> None:
        if self.is_of_this_process and self._members is not None:
            self.dismiss(starts_again=False, failure=reason)
        super().close(reason)
        if self.is_of_this_process:
            super()._forget_secret()
            self._close_channels()

    def _close_channels(self) -> None:
        """Closes the channels, when the server has ended; those of workers are the coordinator's."""
        with self._changed:
            standby, self._standby_ever = self._standby_ever, []
        for process in standby:
            process.close()
        others = {*self._member_channels.values()} | {process.number for process in standby}
        for number, channel in enumerate(self._channels):
            if number not in others and not channel.stdout.closed:
                channel.close()
                channel.stdout.close()
                channel.stderr.close()

    # -- before the start ------------------------------------------------------------------------------------------

    def _numbers_in_use(self) -> Collection[int]:
        return self._channel_of.values() if self._members is None else self._member_channels.values()

    def _forget_secret(self) -> None:
        """Keeps the file with the secret, since other processes may come."""

    def _order(self, secret: str) -> RendezvousOrder:
        source = self._source
        file = str(source.file) if source is not None and source.is_drawn else ""
        return replace(super()._order(secret), is_elastic=True, left_out=self._quorum.left_out, secret_file=file)

    @property
    def _most_channels(self) -> int:
        # One for each process, one for a later one of the same index, and one at whose end the server ends.
        return 2 * (self._count - 1) + 1

    def _collect(self, own: Hello, replicas: int | None) -> Machines:
        self._own, self._replicas = own, replicas
        super()._collect(own, replicas)
        members = self._quorum.choose(own, list(self._arrivals.values()), replicas)
        if members is None:
            raise self._quorum.error(self._count)
        with self._changed:
            self._members = members
            self._member_channels = {one.hello.index: self._channel_of[one.hello.index] for one in members}
            for index, arrival in self._arrivals.items():
                if index not in self._member_channels:
                    self._put_on_standby(arrival)
            with contextlib.suppress(queue.Empty):
                while True:
                    self._note_later(self._events.get_nowait())
        _log.info("the run starts on %d of at most %d workers", len(members) + 1, self._count)
        return machines_of(own, members, replicas)

    def _is_enough(self, waited: float) -> bool:
        present = list(self._arrivals.values())
        if self._quorum.choose(self._own, present, self._replicas) is None:
            self._enough_since = None
            return False
        if self._enough_since is None:
            self._enough_since = waited
            if not self._quorum.is_met(present, 0):
                _log.info("enough processes are there; waiting up to %g s for others", self._quorum.time_limit)
        return self._quorum.is_met(present, waited - self._enough_since)

    def _note(self, event: Message | None) -> None:
        match event:
            case ProcessJoined(arrival, channel):
                self._channel_of[arrival.hello.index] = channel
            case ProcessLeft():
                self._remove(event)
                return
        super()._note(event)

    def _remove(self, left: ProcessLeft) -> None:
        for index in [index for index, channel in self._channel_of.items() if channel == left.channel]:
            arrival = self._arrivals.pop(index)
            del self._channel_of[index]
            is_member = self._members is not None and self._standby.pop(index, None) is None
            if not is_member:  # whose end the coordinator reports
                _log.info("%s has left", arrival.name)

    # -- while the run trains --------------------------------------------------------------------------------------

    def _on_event(self, event: Message | None) -> None:
        with self._changed:
            if self._members is None:
                super()._on_event(event)
            else:
                self._note_later(event)

    def _note_later(self, event: Message | None) -> None:
        """Handles an event after the start, under `_changed`."""
        if self._expected is not None:
            return  # all processes leave
        match event:
            case ProcessJoined(arrival, channel):
                self._channel_of[arrival.hello.index], self._arrivals[arrival.hello.index] = channel, arrival
                self._put_on_standby(arrival)
            case ProcessLeft():
                self._remove(event)

    def _put_on_standby(self, arrival: Arrival) -> None:
        index, workers = arrival.hello.index, len(self._members or ()) + 1
        number = self._channel_of[index]
        self._standby[index] = process = StandbyProcess(arrival, number, self._channels[number])
        self._standby_ever.append(process)
        _log.info("%s is on standby", arrival.name)
        process.notify(
            f"process {index} is on standby: the run trains on {workers} worker{'s' if workers > 1 else ''} without "
            "it. It waits for the next start, or for the end of the run."
        )

    def _refuse(self, process: StandbyProcess) -> None:
        with self._changed:
            is_new = self._standby.pop(process.arrival.hello.index, None) is not None
        if is_new:
            _log.warning("%s is left out: %s", process.arrival.name, process.refused)
            process.refuse()
