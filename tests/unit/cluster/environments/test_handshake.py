"""The handshake proves knowledge of the secret; a listener can neither learn nor replay it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autodist.cluster.environments import handshake
from autodist.cluster.environments.handshake import Challenge, Hello, Proof, RefusedError, decode, nonce
from autodist.cluster.environments.roster import MAX_TRIES, Arrival, Roster
from autodist.cluster.protocol import encode

SECRET = b"a secret of the run"
HELLO = Hello(1, 3, "node1", None, (0, 1), None, (), nonce=nonce())
CHALLENGE = Challenge(nonce())


def test_each_end_shows_the_other_that_it_knows_the_secret() -> None:
    assert handshake.proves(SECRET, HELLO, CHALLENGE, handshake.prove(SECRET, HELLO, CHALLENGE))
    answer = handshake.welcome(SECRET, HELLO, CHALLENGE, 25.0, 3.0)
    assert handshake.is_welcome(SECRET, HELLO, CHALLENGE, answer)
    assert SECRET not in encode(handshake.prove(SECRET, HELLO, CHALLENGE)) + encode(answer)


@pytest.mark.parametrize(
    "hello, challenge, secret",
    [
        (HELLO, CHALLENGE, b"another secret"),
        (HELLO, Challenge(nonce()), SECRET),
        (replace(HELLO, nonce=nonce()), CHALLENGE, SECRET),
        (replace(HELLO, index=2), CHALLENGE, SECRET),
    ],
    ids=["another secret", "another connection", "another nonce", "another process"],
)
def test_a_proof_is_of_its_own_conversation_alone(hello: Hello, challenge: Challenge, secret: bytes) -> None:
    assert not handshake.proves(SECRET, HELLO, CHALLENGE, handshake.prove(secret, hello, challenge))
    assert not handshake.is_welcome(SECRET, HELLO, CHALLENGE, handshake.welcome(secret, hello, challenge, 25.0, 3.0))


def test_a_proof_cannot_be_sent_back_as_a_welcome() -> None:
    proof = handshake.prove(SECRET, HELLO, CHALLENGE)
    answer = replace(handshake.welcome(b"", HELLO, CHALLENGE, 1.0, 1.0), digest=proof.digest)
    assert not handshake.is_welcome(SECRET, HELLO, CHALLENGE, answer)
    assert not handshake.proves(SECRET, HELLO, CHALLENGE, Proof("é"))


@pytest.mark.parametrize("line", [b"GET / HTTP/1.1\n", b"", b'{"kind":"Hello"}\n', b"\xff\n"])
def test_what_is_no_word_is_refused(line: bytes) -> None:
    with pytest.raises(RefusedError, match="sent a line that AutoDist"):
        decode(line)


def arrival(index: int = 1, **said: object) -> Arrival:
    return Arrival(replace(HELLO, index=index, **said), "10.0.0.2", "10.0.0.1")  # type: ignore[arg-type]


def test_a_roll_knows_who_is_missing() -> None:
    roster = Roster(3)
    roster.enter(arrival(2))
    assert roster.missing == (1,)
    roster.enter(arrival(1, count=None))
    assert roster.missing == ()


@pytest.mark.parametrize(
    "said, problem",
    [
        ({"index": 1}, r"its index, 1, is that of a process that joined before, on node1 \(10.0.0.2\)"),
        ({"index": 0}, "its index is 0; allowed: 1 to 2"),
        ({"index": 3}, "its index is 3; allowed: 1 to 2"),
        ({"index": 2, "count": 4}, "it counts 4 processes, the chief 3"),
        ({"index": 2, "version": "0.0.1"}, "its AutoDist is 0.0.1, the chief's"),
    ],
)
def test_who_cannot_take_part_is_refused(said: dict[str, object], problem: str) -> None:
    roster = Roster(3)
    roster.enter(arrival(1))
    with pytest.raises(RefusedError, match=problem):
        roster.enter(arrival(**said))  # type: ignore[arg-type]
    assert roster.missing == (2,)


def test_after_so_many_wrong_secrets_nobody_is_listened_to() -> None:
    roster = Roster(2)
    for _ in range(MAX_TRIES):
        assert not roster.is_closed
        assert roster.refuse_secret().is_secret
    assert roster.is_closed
