"""Mutual authentication of a process and the chief by a shared secret, which is never sent.

    process                               chief
    Hello: its identity, a nonce    →
                                    ←     Challenge: a nonce
    Proof: HMAC of both             →
                                    ←     Welcome: another HMAC of both, or Refused: the reason

Both nonces are drawn for each connection, so that recorded messages cannot be replayed. Later messages are neither
signed nor encrypted, like the tensors that TensorFlow's servers exchange.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

from autodist.cluster import protocol
from autodist.cluster.protocol import Message, encode
from autodist.errors import ClusterError
from autodist.versions import VERSION

MAX_LINE = 1 << 14
"""Limit in bytes on a line from a process that has not authenticated."""


class RefusedError(ClusterError):
    """Raised when the other end refuses this process.

    Args:
        problem: reason and fix.
        is_secret: True if the secrets differ.
        is_complete: True if all processes of the other end's run have joined, so that it may be an earlier run.
    """

    def __init__(self, problem: str, is_secret: bool = False, is_complete: bool = False) -> None:
        self.is_secret, self.is_complete = is_secret, is_complete
        super().__init__(problem)


@dataclass(frozen=True)
class Hello(Message):
    """First message of a process: its identity and its resources.

    Attributes:
        index: index of the process, as counted by its scheduler.
        count: number of processes; None if unknown.
        host: host name of its machine.
        address: address under which others reach it; None for the one that its connection comes from.
        cores: processor cores that it may run on.
        given_cores: number of cores that the scheduler allots to it; None if unknown.
        gpus: unique names of the GPUs that its TensorFlow sees.
        version: version of its AutoDist.
        nonce: random text for this connection.
    """

    index: int
    count: int | None
    host: str
    address: str | None
    cores: tuple[int, ...]
    given_cores: int | None
    gpus: tuple[str, ...]
    version: str = VERSION
    nonce: str = ""


@dataclass(frozen=True)
class Challenge(Message):
    """The chief's answer to `Hello`.

    Attributes:
        nonce: random text for this connection.
    """

    nonce: str


@dataclass(frozen=True)
class Proof(Message):
    """Proof that the process knows the secret.

    Attributes:
        digest: HMAC of both messages so far, with the secret as its key.
    """

    digest: str


@dataclass(frozen=True)
class Welcome(Message):
    """Last message: the chief has accepted the process.

    Attributes:
        digest: HMAC as in `Proof`, for the other direction.
        silence_timeout: seconds without a message from the chief's machine after which it counts as lost.
        stop_timeout: seconds between SIGTERM and SIGKILL for the script.
        is_elastic: True if the process stays for further starts of the run.
    """

    digest: str
    silence_timeout: float
    stop_timeout: float
    is_elastic: bool = False


@dataclass(frozen=True)
class Refused(Message):
    """Last message: the chief has refused the process.

    Attributes:
        problem: reason and fix.
        is_secret: True if the secrets differ.
        is_complete: True if all processes of the chief's run have joined.
    """

    problem: str
    is_secret: bool = False
    is_complete: bool = False


def decode(line: bytes) -> Message:
    """Parses a line of the other end.

    Raises:
        RefusedError: the line is not a message.
    """
    try:
        return protocol.decode(line)
    except protocol.ProtocolError:
        raise RefusedError(
            f"it sent a line that AutoDist {VERSION} does not understand ({line[:60]!r}); check that the address is "
            "the chief's, and that all processes have the same version of AutoDist"
        ) from None


def nonce() -> str:
    """Returns random text for one connection."""
    return secrets.token_hex(16)


def prove(secret: bytes, hello: Hello, challenge: Challenge) -> Proof:
    """Returns the message with which a process proves to the chief that it knows the secret."""
    return Proof(_digest(secret, b"process", hello, challenge))


def proves(secret: bytes, hello: Hello, challenge: Challenge, proof: Proof) -> bool:
    """Returns True if a process has proved that it knows the secret."""
    return _is_same(proof.digest, _digest(secret, b"process", hello, challenge))


def welcome(
    secret: bytes,
    hello: Hello,
    challenge: Challenge,
    silence_timeout: float,
    stop_timeout: float,
    is_elastic: bool = False,
) -> Welcome:
    """Returns the message with which the chief proves to a process that it knows the secret."""
    return Welcome(_digest(secret, b"chief", hello, challenge), silence_timeout, stop_timeout, is_elastic)


def is_welcome(secret: bytes, hello: Hello, challenge: Challenge, answer: Welcome) -> bool:
    """Returns True if the chief has proved that it knows the secret."""
    return _is_same(answer.digest, _digest(secret, b"chief", hello, challenge))


def _digest(secret: bytes, sender: bytes, hello: Hello, challenge: Challenge) -> str:
    content = b"\n".join((b"autodist", sender, encode(hello), encode(challenge)))
    return hmac.new(secret, content, hashlib.sha256).hexdigest()


def _is_same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
