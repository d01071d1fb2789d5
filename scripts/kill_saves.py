#!/usr/bin/env python3
"""Kills a process that saves checkpoints at random moments, and restores the last checkpoint each time.

    python scripts/kill_saves.py --draws 200 --seed 1

A process that has imported all modules forks one that restores the last checkpoint. The fork then saves others, one
after the other, alternately in the foreground and in the background. It is ended by SIGKILL at a random moment. The
next one has to restore a complete checkpoint, no older than the last one reported as on the disk.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from autodist import AutoDist

LONGEST = 2.0
"""Latest moment of the kill, as a multiple of the first save's duration."""

LIMIT = 120.0
"""Time limit in seconds for the start of a process."""

SHAPES = ((300, 1000), (1000,), (), (50, 40, 30))


@dataclass(frozen=True)
class Killed:
    """The progress that a process had printed when it was killed.

    Attributes:
        restored: the step that it restored; 0: none.
        saved: the last step that it reported as on the disk.
    """

    restored: int
    saved: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20, help="number of kills (default 20)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the moments (default 1)")
    parser.add_argument("--folder", help="folder of the checkpoints; default: a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.folder or made
        before, between = Killed(0, 0), 0
        for draw in range(arguments.draws):
            killed = _kill_one(folder, random.Random(f"{arguments.seed} {draw}").uniform(0, LONGEST))
            if killed.restored < before.saved:
                print(f"draw {draw}: step {before.saved} was on the disk, and {killed.restored} was restored")
                return 1
            between += killed.restored > before.saved
            before = killed
    print(f"{arguments.draws} kills; {before.saved} saves; {between} were complete before they were reported")
    return 0


def _kill_one(folder: str, moment: float) -> Killed:
    """Starts a process that restores and saves, and kills it.

    Args:
        folder: the folder of the checkpoints.
        moment: the time of the kill after its first save, as a multiple of that save's duration.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        _restore_and_save(folder, theirs)
    os.close(theirs)
    try:
        output = _lines(ours, LIMIT, until=1)
        began = time.monotonic()
        output += _lines(ours, LIMIT, until=1)
        time.sleep(moment * (time.monotonic() - began))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    output += _lines(ours, LIMIT)  # up to the end, after the kill
    os.close(ours)
    text = output.decode()
    if "error" in text or text.count("\n") < 2:
        raise SystemExit(f"the saving process failed:\n{text}")
    steps = [int(line) for line in text[: text.rindex("\n")].splitlines()]
    return Killed(steps[0], steps[-1])


def _lines(file: int, limit: float, until: int | None = None) -> bytes:
    """Reads the output up to a number of lines, or to the end."""
    output, deadline = b"", time.monotonic() + limit
    while until is None or output.count(b"\n") < until:
        if not select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise SystemExit(f"the saving process has printed nothing for {limit} s but {output.decode()!r}")
        some = os.read(file, 1 << 16)
        if not some:
            break
        output += some
    return output


def _restore_and_save(folder: str, file: int) -> None:
    """Runs in a separate process, and does not return: restores, and saves until it is killed."""
    try:
        values = [tf.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]
        checkpoint = AutoDist().checkpoint(folder, keep=2, values=values)
        step = checkpoint.restore() or 0
        for value in values:
            if not np.all(value.numpy() == step):
                raise ValueError(f"step {step} was restored with other values")
        os.write(file, f"{step}\n".encode())
        while True:
            step += 1
            for value in values:
                value.assign(tf.fill(value.shape, float(step)))
            checkpoint.save(step=step, background=step % 2 == 0)
            checkpoint.wait()
            os.write(file, f"{step}\n".encode())
    except Exception:  # noqa: BLE001 - all of it is printed
        os.write(file, f"error: {traceback.format_exc()}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
