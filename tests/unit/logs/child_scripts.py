"""Scripts in processes of their own, whose standard error tests compare."""

from __future__ import annotations

import os
import subprocess
import sys

from autodist.logs.terminal import LEVEL_VARIABLE


def stderr_of(script: str, level: str = "INFO") -> tuple[str, int]:
    """Runs a script; returns its standard error and its exit status.

    Args:
        script: its lines.
        level: the level of the log.
    """
    environment = {**os.environ, LEVEL_VARIABLE: level}
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    return ended.stderr, ended.returncode
