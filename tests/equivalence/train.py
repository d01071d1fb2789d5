"""Runs training programs one after the other, on one device or under AutoDist, and writes their results.

    python -m tests.equivalence.train --out DIRECTORY --alone PROGRAM …
    python -m tests.equivalence.train --out DIRECTORY --cluster FILE STRATEGY:PROGRAM …

Each worker writes `PROGRAM.INDEX.npz`, or `STRATEGY:PROGRAM.INDEX.npz`. With `--cores N` the machine seems to have N
cores per worker.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # imported objects are never freed

import argparse
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tests.equivalence.cases import PROGRAMS, Alone
from tests.equivalence.strategies import InTurn

SEED = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--alone", action="store_true")
    where.add_argument("--cluster", type=Path)
    parser.add_argument("--cores", type=int)
    parser.add_argument("--unseeded", action="store_true", help="set no seed anywhere")
    parser.add_argument("programs", nargs="+")
    arguments = parser.parse_args()
    gc.enable()
    keras.config.set_floatx("float64")
    if arguments.cores is not None:
        _pretend_cores(arguments.cores)
    builder = InTurn()
    ad = _trainer(arguments.cluster, builder)
    for word in arguments.programs:
        *strategy, name = word.split(":")
        if strategy:
            builder.take(*strategy)
        gc.freeze()  # neither what was imported nor what earlier programs left is gone through again
        keras.utils.clear_session()  # names of layers are counted from 0 again
        if not arguments.unseeded:
            keras.utils.set_random_seed(SEED)
        results = PROGRAMS[name](ad)
        part = arguments.out / f"{word}.{ad.worker_index}.part"
        with open(part, "wb") as file:
            np.savez(file, **results)
        os.rename(part, part.with_suffix(".npz"))


def _trainer(cluster: Path | None, builder: InTurn) -> Any:
    if cluster is None:
        return Alone()
    from autodist import AutoDist

    return AutoDist(cluster, builder)


def _pretend_cores(cores: int) -> None:
    """Simulates a number of cores: sessions get one thread per core, since ordering errors need many threads."""
    os.sched_getaffinity = lambda _: set(range(cores))  # type: ignore[assignment]


if __name__ == "__main__":
    main()
