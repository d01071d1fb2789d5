"""Runs one part of `scripts/gpu_day.py`; the last line that it prints is the result, or the error."""

from __future__ import annotations

import argparse
import signal
import sys

from bench.jobs import JobError

from gpu_parts.checks import CHECKS
from gpu_parts.processes import CheckError
from gpu_parts.speed import measure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=(*CHECKS, "speed"))
    parser.add_argument("option", nargs="?", help="the policy of `policy`, or the model of `speed`")
    parser.add_argument("--gpus", type=int, required=True, help="number of GPUs to use")
    parser.add_argument("--limit", type=float, required=True, help="seconds that its processes may take")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # it still ends the processes that it has started
    try:
        if arguments.name == "speed":
            print(measure(arguments.option, arguments.gpus, arguments.limit))
        else:
            options = [arguments.option] if arguments.option else []
            print(CHECKS[arguments.name](arguments.gpus, arguments.limit, *options))
    except (CheckError, JobError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
