"""One process that saves and restores variables of 2 GB while it trains; prints the times, and those of the raw disk.

python -m bench.save_variables FOLDER

The disk's time is that of one file of as many bytes: written and synced, or read completely into one buffer. Neither
this file nor the restored one is in the system's page cache before. A process cannot clear the cache of the disk's
controller or of the host of a virtual machine, but both files profit from it equally. The two alternate, and the median
of each counts.

Written data first go into the system's memory. A virtual machine's host may still have to allocate that memory, which
takes ten times as long as the writing: 3 to 7 seconds a GB were measured instead of the usual 0.3. So before each save
and each raw file, another file of as many bytes is written and removed, and both then write into its memory.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from autodist import AutoDist
from autodist.checkpoint import Checkpoints
from bench.jobs import ANSWER

VARIABLES, ROWS, WIDTH = 16, 62_500, 512
SHARD_BYTES = ROWS * WIDTH * 4
ALL_BYTES = VARIABLES * SHARD_BYTES
CHUNK = 16 << 20
STEPS, WARMUP = 60, 10
ROUNDS = 3
ROWS_OF_STEP = 64


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    ad = AutoDist()
    with ad.scope():
        # A disk may write zeros faster than the random bytes of the raw file.
        values = (tf.random.stateless_uniform([ROWS, WIDTH], [3, k]) for k in range(VARIABLES))
        variables = [tf.Variable(value, name=f"table_{k}") for k, value in enumerate(values)]
        weight = tf.Variable(tf.random.stateless_uniform([WIDTH, WIDTH], [1, 2], -0.04, 0.04), name="weight")
        step = ad.function(_step_of(variables, weight))
    draw = np.random.default_rng(0)

    def train() -> None:
        step(draw.integers(0, ROWS, ROWS_OF_STEP), draw.normal(size=(1024, WIDTH)).astype(np.float32))

    raw, saved = folder / "raw", folder / "saved"
    raw.mkdir()
    checkpoint = ad.checkpoint(saved, variables=[*variables, weight], keep=1)

    def make_room() -> None:
        _write_raw(raw / "room")
        (raw / "room").unlink()

    def writes() -> float:
        (raw / "file").unlink(missing_ok=True)
        make_room()
        seconds = _write_raw(raw / "file")
        make_room()
        return seconds

    def reads() -> float:
        _forget(saved)
        return _read_raw(raw / "file")

    writes()
    checkpoint.save(step=1)
    found = _by_turns("first_restore", checkpoint.restore, reads)
    for _ in range(WARMUP):
        train()
    found |= _by_turns("save", lambda: checkpoint.save(step=1), writes)
    found |= _by_turns("restore", checkpoint.restore, reads)
    (raw / "file").unlink()
    for _ in range(WARMUP):
        train()
    alone, beside, while_saved = _beside(train, checkpoint)
    found |= {"step": alone, "step_beside": beside, "steps_beside": while_saved}
    sys.stdout.buffer.write(ANSWER + json.dumps(found).encode() + b"\n")
    sys.stdout.flush()


def _step_of(variables: list[tf.Variable], weight: tf.Variable) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Returns a step that gathers rows of each large variable, and computes a product that takes some milliseconds."""

    def step(ids: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            rows = tf.add_n([tf.gather(v, ids) for v in variables])
            loss = tf.reduce_mean(tf.square(rows)) + tf.reduce_mean(tf.square(tf.tanh(x @ weight) @ weight - 1.0))
        *sparse, dense = tape.gradient(loss, [*variables, weight])
        for variable, gradient in zip(variables, sparse, strict=True):
            variable.scatter_sub(tf.IndexedSlices(0.1 * gradient.values, gradient.indices))
        weight.assign_sub(0.1 * dense)
        return loss

    return step


def _beside(train: Callable[[], None], checkpoint: Checkpoints) -> tuple[float, float, int]:
    """Returns the seconds of a step alone, and during a background save; and the number of the latter."""
    alone = [_seconds(train) for _ in range(STEPS)]
    checkpoint.save(step=2, background=True)
    beside = []
    while any(thread.name == "autodist-checkpoint" for thread in threading.enumerate()):
        beside.append(_seconds(train))
    checkpoint.wait()
    alone += [_seconds(train) for _ in range(STEPS)]
    return statistics.median(alone), statistics.median(beside or [0.0]), len(beside)


def _by_turns(name: str, act: Callable[[], object], disk: Callable[[], float]) -> dict[str, float]:
    """Returns the times of an action and of the raw disk, each the median of some turns, and the peak memory of all
    turns.
    """
    turns = [(disk(), *_timed(act)) for _ in range(ROUNDS)]
    disks, seconds, more = zip(*turns, strict=True)
    return {
        f"{name}_disk": statistics.median(disks), name: statistics.median(seconds), f"{name}_bytes": max(more)
    }  # fmt: skip


def _seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _timed(act: Callable[[], object]) -> tuple[float, int]:
    """Returns the seconds, and the largest growth of the process's memory in bytes."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _memory("VmRSS")
    seconds = _seconds(act)
    return seconds, _memory("VmHWM") - before


def _memory(name: str) -> int:
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))


def _write_raw(path: pathlib.Path) -> float:
    """Returns the disk's seconds for writing as many bytes."""
    chunk = os.urandom(CHUNK)

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            for size in _chunks():
                file.write(chunk[:size])
            os.fsync(file.fileno())

    return _seconds(write)


def _read_raw(path: pathlib.Path) -> float:
    """Returns the seconds for reading a file from the disk, without the page cache."""
    _forget(path.parent)
    chunk = bytearray(CHUNK)

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            while file.readinto(chunk):
                pass

    return _seconds(read)


def _chunks() -> Iterator[int]:
    for begin in range(0, ALL_BYTES, CHUNK):
        yield min(CHUNK, ALL_BYTES - begin)


def _forget(folder: pathlib.Path) -> None:
    """Drops a folder's files from the system's page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
