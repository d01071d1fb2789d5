"""Settings by which `autodist verify` makes a script's process record values; needs no TensorFlow."""

from __future__ import annotations

import dataclasses
import json

VARIABLE = "AUTODIST_RECORD"
"""Environment variable with the settings, as JSON."""

NOTES, ERROR = "notes.json", "error.json"
"""Files next to those of the steps: notes on the step, and the error that ended the script."""

VARIABLES, SLOTS, STATE, OUTPUTS = "variable", "slot", "state", "output"
"""Kinds of values, which precede their names."""


@dataclasses.dataclass(frozen=True)
class Recording:
    """Settings of a recorded run.

    Attributes:
        folder: target folder; only the first worker writes there.
        steps: number of training steps, after which the script exits.
        in_float64: True if float64 is Keras's default dtype.
        is_reference: True if the step runs as captured, on one device.
        permutation: seed of the order of the examples of each batch; None: the script's order.
    """

    folder: str
    steps: int
    in_float64: bool
    is_reference: bool
    permutation: int | None = None

    def environment(self) -> dict[str, str]:
        """Returns the environment variables for the script's process."""
        return {VARIABLE: json.dumps(dataclasses.asdict(self)), "PYTHONHASHSEED": "0"}
