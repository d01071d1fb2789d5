"""Control messages: what workers exchange between two steps to agree on variable writes before the next step."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from autodist.json_record import JSONRecord


class ControlKind(enum.StrEnum):
    """The meaning of a control message."""

    READY = "ready"  # to the chief: this worker waits before the step
    QUERY = "query"  # from the chief: it has values for the step; will the worker be ready?
    COMING = "coming"  # to the chief: this worker has not begun the step, or repeats it, and will be ready
    WITHIN = "within"  # to the chief: this worker is in the step
    BEYOND = "beyond"  # to the chief: this worker has finished the step
    AWAY = "away"  # to the chief: this worker waits in another call; the chief sets its values
    VOID = "void"  # from the chief: the step does not count and must be repeated
    VOIDED = "voided"  # to the chief: acknowledges VOID
    GIVEN = "given"  # from the chief: its values follow, as listed
    TAKEN = "taken"  # to the chief: acknowledges the values
    PUSHED = "pushed"  # from the chief: all workers have its values
    WAITING = "waiting"  # to the chief: this worker has waited for long; has the chief begun the step?
    BEGUN = "begun"  # from the chief: it has begun the step, and had no values
    LEFT = "left"  # to the chief: this worker makes no more steps


@dataclass(frozen=True)
class ControlMessage(JSONRecord):
    """A message from one worker to another.

    Attributes:
        kind: meaning of the message.
        step: number of the step that the message is about; workers count the steps that they begin from 1.
        worker: the sender.
        names: names of variables.
        again: True if the step was made before and did not count.
        listing: listing of values.
    """

    kind: ControlKind
    step: int
    worker: int
    names: tuple[str, ...] = ()
    again: bool = False
    listing: str = ""
