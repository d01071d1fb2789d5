#!/usr/bin/env python3
"""Runs everything that has to be seen on a machine with a GPU, in at most ten minutes: `scripts/gpu_day.py`.

    scripts/gpu_day.py                        # all parts, on one GPU or two
    scripts/gpu_day.py --only nccl --only xla
    scripts/gpu_day.py >> docs/gpus.md        # the table; the progress is on the standard error

Each part is a process group with a time limit. One that fails, or is killed at its limit, does not stop the others. The
results are printed as a table for docs/gpus.md. The exit status is 1 if a part has failed. Without a GPU, every part is
skipped.

Two workers share the GPU if there is only one. Logical devices cannot stand for several: the YAML, `verify` and the
workers count physical GPUs. `verify` then compares one worker on the GPU with one device.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bench.machine import made_with
from gpu_parts.processes import last_line

from autodist.cli.checking.probe import see_gpus
from autodist.cluster.hardware import query_gpus

SCRIPTS = Path(__file__).resolve().parent
EXAMPLES = SCRIPTS.parent / "examples"
WHOLE = 600.0
"""Time limit in seconds for everything, including the count of the GPUs, which may take one minute."""
GRACE = 5.0
"""Seconds that a process has to end after SIGTERM."""
DRIVER_LIMIT = 20.0
TAIL = 15
"""Number of last lines that are shown of a part that has failed."""
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True)
class Part:
    """A part of the day.

    Attributes:
        name: its name, also for `--only`.
        command: the process; the last line of its output is the result, or the error.
        limit: seconds that it may take.
    """

    name: str
    command: tuple[str, ...]
    limit: float


@dataclass(frozen=True)
class Outcome:
    """The result of a part.

    Attributes:
        part: name of the part.
        status: passed, failed or skipped.
        text: the figures, or the reason.
        seconds: its duration.
    """

    part: str
    status: str
    text: str
    seconds: float = 0.0


def parts(gpus: int) -> list[Part]:
    """Returns all parts in their order, for one GPU or more."""
    used = min(gpus, 2)

    def own(name: str, limit: float, *arguments: str) -> Part:
        # The processes of a part end before the part, which then reports their last lines.
        options = (f"--gpus={used}", f"--limit={limit - GRACE}")
        return Part(name, (sys.executable, "-m", "gpu_parts", *(arguments or (name,)), *options), limit)

    def verified(example: str, limit: float) -> Part:
        command = (sys.executable, "-m", "autodist", "verify", "--workers", str(used), "--steps", "5")
        return Part(f"verify {example}", (*command, str(EXAMPLES / f"{example}.py")), limit)

    return [
        own("placement", 30),
        own("memory-growth", 45),
        own("shuffle", 35),
        own("nccl", 40),
        own("mixed_float16", 35, "policy", "mixed_float16"),
        own("mixed_bfloat16", 35, "policy", "mixed_bfloat16"),
        own("xla", 35),
        verified("digits_keras", 35),
        verified("digits_step", 35),
        verified("digits_tf1", 50),
        own("speed mlp", 40, "speed", "mlp"),
        own("speed mobilenet", 65, "speed", "mobilenet"),
        own("speed transformer", 60, "speed", "transformer"),
    ]


def main() -> int:
    """Runs the parts, and prints the table."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[part.name for part in parts(1)], action="append", help="a part; repeatable")
    only = parser.parse_args().only
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # it still ends the processes that it has started
    seen = see_gpus()
    chosen = [part for part in parts(max(seen.count, 1)) if not only or part.name in only]
    if seen.count:
        outcomes = run_all(chosen, lambda: WHOLE - (time.monotonic() - began))
    else:
        outcomes = [Outcome(part.name, SKIPPED, f"no GPU: {seen.reason}") for part in chosen]
    print(table(outcomes))
    return int(any(outcome.status == FAILED for outcome in outcomes))


def run_all(chosen: Sequence[Part], left: Callable[[], float]) -> list[Outcome]:
    """Runs parts one after the other; those for which no time is left are skipped.

    Args:
        chosen: the parts.
        left: returns the seconds that are left for everything.
    """
    outcomes = []
    for part in chosen:
        limit = min(part.limit, left())
        if limit > 0:
            outcomes.append(run(part, limit))
        else:
            outcomes.append(Outcome(part.name, SKIPPED, f"earlier parts have taken the whole {WHOLE:.0f} s"))
        print(f"{part.name}: {outcomes[-1].status}, {outcomes[-1].text}", file=sys.stderr, flush=True)
    return outcomes


def run(part: Part, limit: float) -> Outcome:
    """Runs a part in a process group, and ends the group."""
    # Memory growth: several processes share a GPU.
    environment = os.environ | {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "TF_CPP_MIN_LOG_LEVEL": "1"}
    began = time.monotonic()
    # Files, since a pipe stays open as long as any descendant holds it.
    with tempfile.TemporaryFile("w+b") as output, tempfile.TemporaryFile("w+b") as errors:
        process = subprocess.Popen(
            part.command, cwd=SCRIPTS, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
        try:
            is_in_time = _has_ended(process, limit)
        finally:
            end_group(process)
        seconds = time.monotonic() - began
        text, error_text = _text(output), _text(errors)
    if is_in_time and process.returncode == 0:
        return Outcome(part.name, PASSED, last_line(text), seconds)
    print(*(text + error_text).splitlines()[-TAIL:], sep="\n", file=sys.stderr, flush=True)
    last = last_line(error_text or text)
    late = f"killed after {limit:.0f} s; its last line: {last}"
    return Outcome(part.name, FAILED, f"{last} (status {process.returncode})" if is_in_time else late, seconds)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends all processes of the group that `process` leads, and waits for it."""
    if not _has_ended(process, 0):
        os.killpg(process.pid, signal.SIGTERM)
        _has_ended(process, GRACE)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _has_ended(process: subprocess.Popen[bytes], limit: float) -> bool:
    """Returns True if a process ends within `limit` seconds. The id of its group stays valid until it is waited for."""
    descriptor = os.pidfd_open(process.pid)
    try:
        return bool(select.select([descriptor], [], [], limit)[0])
    finally:
        os.close(descriptor)


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns the conditions and the results as Markdown."""
    made = made_with()
    gpus = ", ".join(query_gpus("name", DRIVER_LIMIT)) or "no GPU"
    head = ["| part | result | figures, or the reason | seconds |", "|---|---|---|---|"]
    conditions = f"{made['date']}, {gpus}, TensorFlow {made['tensorflow']}, Keras {made['keras']}:"
    return "\n".join([conditions, "", *head, *map(_row, outcomes)])


def _row(outcome: Outcome) -> str:
    text = outcome.text.replace("|", "\\|")
    seconds = "" if outcome.status == SKIPPED else f"{outcome.seconds:.0f}"
    return f"| {outcome.part} | {outcome.status} | {text} | {seconds} |"


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
