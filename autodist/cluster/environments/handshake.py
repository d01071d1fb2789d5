"""How a process shows the chief that it belongs to the run, and the chief the process, without saying the secret.

    process                               chief
    Hello: who it is, a nonce       →
                                    ←     Challenge: a nonce, how long it takes
    Proof: HMAC of all of that      →
                                    ←     Welcome: another HMAC of it, or Refused: why

Both nonces are drawn for the one connection, so that what was heard on another is of no use. What follows is neither
signed nor encrypted, as the tensors are not either, which go from one TensorFlow server to the other.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from autodist.errors import ClusterError
from autodist.versions import VERSION

LONGEST_LINE = 1 << 14
"""Bytes that are read of somebody who has not proved anything."""


class RefusedError(ClusterError):
    """The other end does not take this process into the run.

    Args:
        problem: what is wrong, with the mend.
        is_secret: whether it is the secret.
    """

    def __init__(self, problem: str, is_secret: bool = False) -> None:
        self.is_secret = is_secret
        super().__init__(problem)


@dataclass(frozen=True)
class Hello:
    """Who a process is, and what it has.

    Attributes:
        index: of the process in its scheduler's counting.
        count: how many it counts; None: it was not told.
        host: the machine's own name.
        address: under which others reach it; None: that which its connection comes from.
        cores: numbers of the processor cores that it may run on.
        given_cores: how many it was given; None: it was not told.
        gpus: which its TensorFlow sees, by names that no two have.
        version: of its AutoDist.
        nonce: drawn for this connection.
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
    kind: Literal["Hello"] = field(default="Hello", kw_only=True)


@dataclass(frozen=True)
class Challenge:
    """Attributes:
    nonce: drawn for this connection."""

    nonce: str
    kind: Literal["Challenge"] = field(default="Challenge", kw_only=True)


@dataclass(frozen=True)
class Proof:
    """Attributes:
    digest: of the conversation so far, under the secret."""

    digest: str
    kind: Literal["Proof"] = field(default="Proof", kw_only=True)


@dataclass(frozen=True)
class Welcome:
    """The process is one of the run.

    Attributes:
        digest: of the conversation so far, under the secret, for the other direction.
        silence_timeout: seconds without a word from the chief's machine after which it counts as lost.
        stop_timeout: seconds between asking the script to end and ending it.
    """

    digest: str
    silence_timeout: float
    stop_timeout: float
    kind: Literal["Welcome"] = field(default="Welcome", kw_only=True)


@dataclass(frozen=True)
class Refused:
    """The process is none of the run.

    Attributes:
        problem: why, with the mend.
        is_secret: whether its secret is another.
    """

    problem: str
    is_secret: bool = False
    kind: Literal["Refused"] = field(default="Refused", kw_only=True)


Word = Hello | Challenge | Proof | Welcome | Refused

_WORD: TypeAdapter[Word] = TypeAdapter(Annotated[Word, Field(discriminator="kind")])


def encode(word: Word) -> bytes:
    """The line that carries a word."""
    return _WORD.dump_json(word) + b"\n"


def decode(line: bytes) -> Word:
    """The word that a line carries.

    Raises:
        RefusedError: it carries none.
    """
    try:
        return _WORD.validate_json(line)
    except ValidationError:
        raise RefusedError(
            f"it says what no AutoDist {VERSION} does ({line[:60]!r}); see whether the address is the chief's, and "
            "whether all processes have the same version of AutoDist"
        ) from None


def nonce() -> str:
    """Drawn for one connection."""
    return secrets.token_hex(16)


def prove(secret: bytes, hello: Hello, challenge: Challenge) -> Proof:
    """What shows the chief that a process knows the secret."""
    return Proof(_digest(secret, b"process", hello, challenge))


def proves(secret: bytes, hello: Hello, challenge: Challenge, proof: Proof) -> bool:
    """Whether a process has shown it."""
    return _is_same(proof.digest, _digest(secret, b"process", hello, challenge))


def welcome(secret: bytes, hello: Hello, challenge: Challenge, silence_timeout: float, stop_timeout: float) -> Welcome:
    """What shows a process that the chief knows the secret."""
    return Welcome(_digest(secret, b"chief", hello, challenge), silence_timeout, stop_timeout)


def is_welcome(secret: bytes, hello: Hello, challenge: Challenge, answer: Welcome) -> bool:
    """Whether the chief has shown it."""
    return _is_same(answer.digest, _digest(secret, b"chief", hello, challenge))


def _digest(secret: bytes, who: bytes, hello: Hello, challenge: Challenge) -> str:
    said = b"\n".join((b"autodist", who, encode(hello), encode(challenge)))
    return hmac.new(secret, said, hashlib.sha256).hexdigest()


def _is_same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
