"""Who has come so far: which process takes which place of the run, and who is refused."""

from __future__ import annotations

from dataclasses import dataclass, field

from autodist.cluster.environments.handshake import Hello, RefusedError
from autodist.versions import VERSION

MOST_TRIES = 10
"""With a wrong secret, after which nobody is listened to any more."""


@dataclass(frozen=True)
class Arrival:
    """A process that has come.

    Attributes:
        hello: what it said.
        from_host: address that its connection comes from.
        to_host: the chief's address that it has reached.
    """

    hello: Hello
    from_host: str
    to_host: str

    @property
    def name(self) -> str:
        """For messages: the process, its machine, and where it comes from."""
        host = self.hello.host
        return f"process {self.hello.index} on {host}" + (f" ({self.from_host})" if host != self.from_host else "")


@dataclass
class Roster:
    """The processes of a run; not for several threads at once.

    Args:
        count: how many there are, the chief, process 0, included.
    """

    count: int
    _arrivals: dict[int, Arrival] = field(default_factory=dict)
    _tries: int = 0

    @property
    def missing(self) -> tuple[int, ...]:
        """Indices of those that have not come."""
        return tuple(index for index in range(1, self.count) if index not in self._arrivals)

    @property
    def is_closed(self) -> bool:
        """Whether so many came with a wrong secret that nobody is listened to any more."""
        return self._tries >= MOST_TRIES

    def refuse_secret(self) -> RefusedError:
        """Notes that a process came with another secret; returns the error to tell it."""
        self._tries += 1
        return RefusedError("its secret is another than the chief's; give all processes of the run the same", True)

    def enter(self, arrival: Arrival) -> None:
        """Notes a process that has proved that it knows the secret.

        Raises:
            RefusedError: it cannot take part.
        """
        hello = arrival.hello
        if hello.version != VERSION:
            raise RefusedError(f"its AutoDist is {hello.version}, the chief's {VERSION}; install the same on both")
        if hello.count not in (None, self.count):
            raise RefusedError(
                f"it counts {hello.count} processes, the chief {self.count}; tell both the same number, or see whether "
                "it is of another run"
            )
        if not 1 <= hello.index < self.count:
            raise RefusedError(
                f"its index is {hello.index}; allowed: 1 to {self.count - 1}, each once, since the chief has 0 and "
                f"counts {self.count} processes"
            )
        before = self._arrivals.get(hello.index)
        if before is not None:
            raise RefusedError(
                f"its index, {hello.index}, is that of a process which came before, on {before.hello.host} "
                f"({before.from_host}); give each process its own"
            )
        self._arrivals[hello.index] = arrival
