"""Plays schedules of faults that are drawn from seeds: `python scripts/chaos.py --draws 20 [--seed 0]`.

Each is a run of two workers that are killed, stopped, cut off, raise, or cannot save, at drawn steps; it has to tell
each cause, to leave nothing behind, and to end with the values of a run without a fault. Status 1 where one did not,
with the seed to play it again: `--seed N --draws 1`. Runs wait for most of their time, for what does not answer and
before they start again, so that several may be played side by side (`--at-once 4`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.chaos.plays import play
from tests.chaos.schedules import draw


def main() -> int:
    """Plays them, and says how each went."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--draws", type=int, default=20, help="how many schedules")
    options.add_argument("--seed", type=int, default=0, help="of the first")
    options.add_argument("--at-once", type=int, default=1, help="how many are played at the same time")
    asked = options.parse_args()
    with ThreadPoolExecutor(asked.at_once) as threads:
        return int(not all(threads.map(_recovers, range(asked.seed, asked.seed + asked.draws))))


def _recovers(seed: int) -> bool:
    schedule, began = draw(seed), time.monotonic()
    error: AssertionError | None = None
    with tempfile.TemporaryDirectory(prefix="autodist-chaos-") as folder:
        try:
            play(schedule, Path(folder))
        except AssertionError as raised:
            error = raised
    said = "ok" if error is None else f"FAILED\n{error}"
    sys.stdout.write(f"{schedule}: {time.monotonic() - began:.0f} s, {said}\n")
    sys.stdout.flush()
    return error is None


if __name__ == "__main__":
    sys.exit(main())
