"""Earlier checkpoints can be restored, at whatever moment a saving process is killed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "kill_saves.py"


@pytest.mark.processes
@pytest.mark.slow
def test_eight_kills_at_drawn_moments_leave_what_was_saved():
    """`python scripts/kill_saves.py --draws 200` draws more."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--draws", "8"], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    saves = re.search(r"8 kills; (\d+) saves; \d+ were complete", done.stdout)
    assert saves is not None and int(saves[1]) >= 8
