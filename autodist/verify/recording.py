"""What `autodist verify` tells a script's process to record, and where that leaves it; known without TensorFlow."""

from __future__ import annotations

import dataclasses
import json

VARIABLE = "AUTODIST_RECORD"
"""Environment variable that says what to record, as JSON."""

NOTES, ERROR = "notes.json", "error.json"
"""Files beside those of the steps: what is known of the step, and by what the script ended badly."""

VARIABLES, SLOTS, STATE, OUTPUTS = "variable", "slot", "state", "output"
"""What a value is, as it stands before its name."""


@dataclasses.dataclass(frozen=True)
class Recording:
    """What to record.

    Attributes:
        folder: where to; the first worker alone writes there.
        steps: that train; after so many the script is ended.
        in_float64: whether Keras makes everything in float64 that the script gives no type.
        is_reference: whether the step runs as it was captured, on one device.
        permutation: seed of the order in which the examples of each batch are given; None: as the script has them.
    """

    folder: str
    steps: int
    in_float64: bool
    is_reference: bool
    permutation: int | None = None

    def environment(self) -> dict[str, str]:
        """What the script's process finds in its environment."""
        return {VARIABLE: json.dumps(dataclasses.asdict(self)), "PYTHONHASHSEED": "0"}
