from __future__ import annotations

from autodist.cluster.timeouts import HeartbeatTimeout

LIMIT = 25.0


class Clock:
    """A clock that shows a settable time."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def looks_until_too_long(silence: HeartbeatTimeout, clock: Clock, most: int = 1000) -> int:
    """Returns the number of checks, at the usual interval, until `silence` times out."""
    for count in range(1, most):
        clock.now += silence.poll_interval
        if silence.has_expired():
            return count
    raise AssertionError("never too long")


def test_connection_is_lost_just_after_the_limit() -> None:
    clock = Clock()
    silence = HeartbeatTimeout(LIMIT, clock=clock)
    assert looks_until_too_long(silence, clock) == LIMIT / silence.poll_interval + 1


def test_a_word_starts_the_silence_anew() -> None:
    clock = Clock()
    silence = HeartbeatTimeout(LIMIT, clock=clock)
    for _ in range(100):
        clock.now += LIMIT - silence.poll_interval
        assert not silence.has_expired()
        silence.restart()
    assert looks_until_too_long(silence, clock) == LIMIT / silence.poll_interval + 1


def test_the_grace_is_for_the_first_message_alone() -> None:
    clock = Clock()
    silence = HeartbeatTimeout(LIMIT, grace=20, clock=clock)
    assert looks_until_too_long(silence, clock) == (20 + LIMIT) / silence.poll_interval + 1
    silence.restart()
    assert looks_until_too_long(silence, clock) == LIMIT / silence.poll_interval + 1


def test_time_in_which_this_process_did_not_run_is_no_silence() -> None:
    clock = Clock()
    silence = HeartbeatTimeout(LIMIT, clock=clock)
    clock.now += 3600
    assert not silence.has_expired()
    assert looks_until_too_long(silence, clock) >= (LIMIT - 1) / silence.poll_interval


def test_a_small_limit_is_looked_at_more_often() -> None:
    clock = Clock()
    silence = HeartbeatTimeout(1.0, clock=clock)
    assert silence.poll_interval <= 0.2
    began = clock.now
    looks_until_too_long(silence, clock)
    assert 1.0 < clock.now - began < 1.5


def test_looks_that_come_late_under_load_still_end_the_silence() -> None:
    clock = Clock()
    silence = HeartbeatTimeout(LIMIT, clock=clock)
    began = clock.now
    while not silence.has_expired():
        clock.now += 3 * silence.poll_interval
    assert clock.now - began < 2 * LIMIT
