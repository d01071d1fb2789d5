"""Letters: what workers tell one another between two steps, so that they agree on what comes first."""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass


class ControlKind(enum.StrEnum):
    """What a letter says."""

    READY = "ready"  # to the chief: I stand still before the step
    ASKED = "asked"  # from the chief: I have values for the step; do you come?
    COMING = "coming"  # to the chief: I shall be ready, since I have not begun the step
    WITHIN = "within"  # to the chief: I am in the step
    BEYOND = "beyond"  # to the chief: I have made the step
    VOID = "void"  # from the chief: make the step, and then again
    VOIDED = "voided"  # to the chief: I know
    GIVEN = "given"  # from the chief: my values come, as listed
    TAKEN = "taken"  # to the chief: I have them
    PUSHED = "pushed"  # from the chief: all have my values
    WAITING = "waiting"  # to the chief: I have waited for long; have you begun the step?
    BEGUN = "begun"  # from the chief: I have, and had no values
    LEFT = "left"  # to the chief: I make no more steps


@dataclass(frozen=True)
class ControlMessage:
    """What one worker tells another.

    Attributes:
        subject: what it says.
        step: the step that it is about, counted from 1 as workers begin them.
        worker: who says it.
        names: of variables.
        again: whether the step was made before and did not count.
        listing: of values.
    """

    subject: ControlKind
    step: int
    worker: int
    names: tuple[str, ...] = ()
    again: bool = False
    listing: str = ""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, message: bytes) -> ControlMessage:
        content = json.loads(message)
        return cls(**{**content, "subject": ControlKind(content["subject"]), "names": tuple(content["names"])})
