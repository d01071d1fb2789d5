"""Limits of time: how long is waited for what before it counts as failed; all of them, with their defaults."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from autodist.resources._model import Model

LONGEST = 1_000_000
"""Seconds; some eleven days."""


def _limit(default: float) -> Any:
    allowed = f"a number of seconds above 0, at most {LONGEST}"
    return Field(default=default, gt=0, le=LONGEST, allow_inf_nan=False, description=allowed)


class Timeouts(Model):
    """Keys of the YAML that limit how long a run waits, in seconds. What is missed says which of them to raise.

    Where this machine has more to do than it has cores, and while a process is suspended, seconds count for less:
    limits are for what a process could have done in that time (`autodist.cluster.load_adjusted_clock`).

    Attributes:
        connect_timeout: for reaching a machine over SSH: one that does not answer yet, since it boots, or that admits
            no more logins is tried again for so long. It limits each step of a connection, too: the server's greeting,
            logging in.
        reach_timeout: until every machine has said what it is, from when it should have been reached.
        join_timeout: in a given cluster, until the processes that its scheduler starts have met.
        start_timeout: in the chief's first step, until every other worker's script has come to it.
        silence_timeout: without a word from the other end of an SSH connection before it counts as lost. TCP sends what
            was lost again after ever longer pauses: a link that was cut is silent for up to twice as long as it was
            cut. So by default ten seconds and more without a network do no harm.
        stall_timeout: in one step, or after the end of the chief's script, from which on a worker whose script has
            ended counts as one that will never come.
        answer_timeout: that a worker's process may take to say what it does, while the chief waits for it.
        deadlock_timeout: from which on workers that are all within steps, and compute nothing, count as waiting for one
            another. A step may wait for something else than workers, a disk far away, say.
        cause_timeout: to learn why another worker went away, once TensorFlow has seen that it did; and for which a
            worker whose script fails before the chief's first step lets the chief fail of the same first.
        stop_timeout: between asking a script to end (SIGTERM) and ending it (SIGKILL), where a run failed.
        end_timeout: for the process of a script that has ended well: exit handlers, threads, TensorFlow itself.
    """

    connect_timeout: float = _limit(60.0)
    reach_timeout: float = _limit(60.0)
    join_timeout: float = _limit(300.0)
    start_timeout: float = _limit(300.0)
    silence_timeout: float = _limit(25.0)
    stall_timeout: float = _limit(60.0)
    answer_timeout: float = _limit(60.0)
    deadlock_timeout: float = _limit(300.0)
    cause_timeout: float = _limit(8.0)
    stop_timeout: float = _limit(3.0)
    end_timeout: float = _limit(300.0)
