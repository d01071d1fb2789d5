"""Runs fault schedules drawn from seeds: `python scripts/chaos.py --draws 20 [--seed 0]`.

Each is a run of two workers that are killed, stopped, disconnected, raise, or cannot save, at random steps. The run has
to report each cause, leave nothing behind, and end with the values of a run without a fault. All schedules run; the
last line counts the failed ones and lists their seeds, and the status is then 1. `--seed N --draws 1` repeats one. Runs
spend most of their time waiting, for peers that do not answer and before restarts, so several can run concurrently
(`--at-once 4`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.chaos.plays import play
from tests.chaos.schedules import draw


def main() -> int:
    """Runs all schedules, and prints the result of each and a total."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--draws", type=int, default=20, help="number of schedules")
    options.add_argument("--seed", type=int, default=0, help="seed of the first schedule")
    options.add_argument("--at-once", type=int, default=1, help="number of schedules that run at the same time")
    arguments = options.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.draws)
    failed: list[str] = []
    with ThreadPoolExecutor(arguments.at_once) as threads:
        plays = {seed: threads.submit(_seconds_of, seed) for seed in seeds}
        for seed, played in plays.items():
            if error := played.exception():
                failed.append(str(seed))
                _print(f"{draw(seed)}: FAILED\n{''.join(traceback.format_exception(error))}")
            else:
                _print(f"{draw(seed)}: {played.result():.0f} s, ok")
    named = f": seeds {', '.join(failed)}" if failed else ""
    _print(f"{len(plays)} schedules played, {len(failed)} failed{named}")
    return int(bool(failed))


def _seconds_of(seed: int) -> float:
    """Runs a schedule and returns its duration in seconds."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="autodist-chaos-") as folder:
        play(draw(seed), Path(folder))
    return time.monotonic() - began


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
