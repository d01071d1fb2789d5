"""Plays schedules of faults that are drawn from seeds: `python scripts/chaos.py --draws 20 [--seed 0]`.

Each is a run of two workers that are killed, stopped, cut off, raise, or cannot save, at drawn steps; it has to tell
each cause, to leave nothing behind, and to end with the values of a run without a fault. Status 1 where one did not,
with the seed to play it again: `--seed N --draws 1`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.chaos.plays import play
from tests.chaos.schedules import draw


def main() -> int:
    """Plays them, one after the other, and says how each went."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--draws", type=int, default=20, help="how many schedules")
    options.add_argument("--seed", type=int, default=0, help="of the first")
    asked = options.parse_args()
    failed = 0
    for seed in range(asked.seed, asked.seed + asked.draws):
        schedule, began = draw(seed), time.monotonic()
        with tempfile.TemporaryDirectory(prefix="autodist-chaos-") as folder:
            try:
                play(schedule, Path(folder))
                said = "ok"
            except AssertionError as error:
                failed += 1
                said = f"FAILED\n{error}"
        sys.stdout.write(f"{schedule}: {time.monotonic() - began:.0f} s, {said}\n")
        sys.stdout.flush()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
