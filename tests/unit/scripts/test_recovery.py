"""The parts of a recovery, from the marks of a run that lost a worker."""

from __future__ import annotations

from typing import Any

import pytest
from bench.recovery import Recovery

CHIEF = [
    ("script", 0.0), ("imported", 5.0), ("traced", 7.0), ("joined", 9.0), ("step", 10.0), ("step", 11.0),
    ("raised", 20.5), ("ended", 21.0), ("script", 23.0), ("imported", 26.0), ("restoring", 26.5), ("restored", 26.75),
    ("traced", 28.0), ("joined", 29.0), ("step", 31.0),
]  # fmt: skip


def mark(name: str, at: float, is_chief: bool | None = True, step: int = 0) -> dict[str, Any]:
    return {"mark": name, "at": at, "is_chief": is_chief, "step": step}


def test_the_parts_after_the_noticed_loss_add_up_to_the_time_until_the_next_step() -> None:
    chief = [mark(name, at, None if name in ("script", "imported") else True, step=11) for name, at in CHIEF]
    killed = mark("killed", 20.0, is_chief=False, step=17)
    found = Recovery.of([*chief, killed, mark("step", 30.5, is_chief=False)])
    parts = found.noticed, found.ended, found.left, found.imported, found.captured, found.joined, found.rewritten
    assert parts == (0.5, 0.5, 2.0, 3.0, 1.75, 1.0, 2.0)
    assert (found.restored, found.cold, found.lost_steps) == (0.25, 10.0, 7)
    assert found.seconds == pytest.approx(31.0 - 20.5)
