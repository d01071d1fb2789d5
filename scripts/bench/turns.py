"""One process's part of a timed training: its arguments, its turns, and its report; for every framework."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.models import TASKS, Task

ANSWER = "BENCH "


@dataclass(frozen=True)
class Training:
    """One process's part of a training.

    Attributes:
        step: makes one step and returns the loss.
        leads: True if the steps of this process are timed.
        about: returns further content of its report, at the end.
    """

    step: Callable[[], float]
    leads: bool = True
    about: Callable[[], dict[str, Any]] = dict


def parse_arguments(*ways: str) -> argparse.Namespace:
    """Returns the arguments with which `bench.jobs` starts a process for one of some ways of training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=ways)
    parser.add_argument("model", choices=TASKS)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--builder", default="AllReduce")
    parser.add_argument("--role", default="main")
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--intra", type=int, required=True)
    parser.add_argument("--inter", type=int, required=True)
    parser.add_argument("--of-cores", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--limit", type=float, required=True)
    parser.add_argument("--reports", required=True)
    parser.add_argument("--bytes", type=int, default=0)
    parser.add_argument("--delay", type=float, default=0)
    parser.add_argument("--rate", type=float, default=0)
    parser.add_argument("--cluster", default="")
    parser.add_argument("--on-gpus", type=int, default=0)
    return parser.parse_args()


def parts(task: Task, index: int, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the part `index` of `count` of each global batch, repeatedly."""
    x, y = task.make_data()
    each = task.batch // count
    while True:
        for start in range(index * each, len(x), task.batch):
            yield x[start : start + each], y[start : start + each]


def run(arguments: argparse.Namespace, training: Training) -> None:
    """Runs the steps: those of the leading process in turns, on request. Reports the peak memory."""
    for _ in range(arguments.warmup):
        training.step()
    if training.leads:
        _take_turns(training)
    else:
        for _ in range(arguments.steps):
            training.step()
    own = pathlib.Path(arguments.reports) / f"{arguments.role}{0 if training.leads else os.getpid()}.json"
    own.write_text(json.dumps({**training.about(), "peak_bytes": peak_bytes()}))
    faulthandler.cancel_dump_traceback_later()


def _take_turns(training: Training) -> None:
    print(f"{ANSWER}ready", flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            start = time.perf_counter()
            training.step()
            seconds.append(time.perf_counter() - start)
        print(f"{ANSWER}{json.dumps(seconds)}", flush=True)


def peak_bytes() -> int:
    """Returns the peak memory of this process (VmHWM)."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM; the memory of a process can be measured on Linux only")
