"""Standby processes: those of an elastic run that have joined and take no part until its next start."""

from __future__ import annotations

from dataclasses import replace

from autodist.cluster.agent import find_own_facts
from autodist.cluster.agent_connection import AgentConnection
from autodist.cluster.environments.roster import Arrival
from autodist.cluster.preflight import compared_packages, faults
from autodist.cluster.protocol import Facts, Inspect, Lost, Message, Notice, Stop
from autodist.cluster.script import Script
from autodist.cluster.transport import Channel
from autodist.waits import Event


class StandbyProcess(AgentConnection):
    """The connection of the chief to a standby process.

    Args:
        arrival: the process.
        number: number of its channel.
        channel: channel to it.

    Attributes:
        arrival: the process.
        number: number of its channel.
        refused: the reason why the run cannot use it; None if it can, or if that is not known yet.
    """

    def __init__(self, arrival: Arrival, number: int, channel: Channel) -> None:
        self.arrival, self.number = arrival, number
        self.refused: str | None = None
        self._answer: Facts | Lost | None = None
        self._has_answered = Event()
        super().__init__(f"standby-{arrival.hello.index}", channel)

    def notify(self, text: str) -> None:
        """Prints a text on the process's output."""
        self.send(Notice(text))

    def is_ready(self, script: Script, limit: float) -> bool:
        """Returns True if the process passes the checks of a start; it is refused if it does not.

        Args:
            script: the script of the run.
            limit: seconds to wait for the facts of its machine.
        """
        if self.refused is None and self._answer is None:
            request = Inspect(script.file, script.directory, None, compared_packages())
            own = replace(find_own_facts(request), digest=script.digest)
            self.send(request)
            if self._has_answered.wait(limit) and isinstance(self._answer, Facts):
                found = faults(self._answer, own, script.name)
                self.refused = " ".join(found) or None
        return self.refused is None and isinstance(self._answer, Facts)

    def refuse(self) -> None:
        """Sends the reason for the refusal to the process, which ends."""
        self.send(Lost(f"the run cannot use this process: {self.refused}"))

    def dismiss(self, starts_again: bool, failure: str = "") -> None:
        """Ends the connection: the process joins the next start, or ends, as a failure if the run has failed.

        Args:
            starts_again: True if the run starts again.
            failure: the reason why the run ends; empty if it ends well.
        """
        self.send(Stop(failure, starts_again=starts_again))
        self.end_input()

    def _handle(self, message: Message) -> None:
        if isinstance(message, Facts | Lost) and self._answer is None:
            self._answer = message
            self._has_answered.set()
