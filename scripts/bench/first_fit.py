"""Runs one step of ResNet50's `fit` and reports its end; for `bench.first_step`, alone or on workers."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, nullcontext

import keras
import numpy as np

BATCH, IMAGE, CLASSES = 8, (96, 96, 3), 10


def main() -> None:
    scope, is_chief = _begin(int(sys.argv[1]))
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((BATCH, *IMAGE), dtype=np.float32), rng.integers(CLASSES, size=BATCH)
    with scope:
        model = keras.applications.ResNet50(weights=None, input_shape=IMAGE, classes=CLASSES)
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[_Says(is_chief)])


def _begin(workers: int) -> tuple[AbstractContextManager[object], bool]:
    """Returns the scope in which the model is built and trained, and True if this process reports."""
    if not workers:
        return nullcontext(), True
    from autodist import AutoDist, ResourceSpec  # here, since the script alone does not use it

    nodes = [{"address": "localhost", "cpus": list(range(workers)), "workers": workers}]
    ad = AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": nodes}))
    return ad.scope(), ad.is_chief


class _Says(keras.callbacks.Callback):
    """Prints the end of the first step, by the clock that all processes of the machine share."""

    def __init__(self, is_chief: bool) -> None:
        super().__init__()
        self._is_chief = is_chief

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if self._is_chief:
            print(f"BENCH {time.monotonic()}", flush=True)


if __name__ == "__main__":
    main()
