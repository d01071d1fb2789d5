"""Makes one step of `fit` of ResNet50 and says when it has ended; for `bench.first_step`, alone or on workers."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext

import keras
import numpy as np

from autodist import AutoDist, ResourceSpec

BATCH, IMAGE, CLASSES = 8, (96, 96, 3), 10


def main() -> None:
    workers = int(sys.argv[1])
    nodes = [{"address": "localhost", "cpus": list(range(workers)), "workers": workers}]
    ad = AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": nodes})) if workers else None
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((BATCH, *IMAGE), dtype=np.float32), rng.integers(CLASSES, size=BATCH)
    with ad.scope() if ad is not None else nullcontext():
        model = keras.applications.ResNet50(weights=None, input_shape=IMAGE, classes=CLASSES)
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[_Says(ad is None or ad.is_chief)])


class _Says(keras.callbacks.Callback):
    """Says when the first step has ended, by the clock that all processes of the machine share."""

    def __init__(self, is_chief: bool) -> None:
        super().__init__()
        self._is_chief = is_chief

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if self._is_chief:
            print(f"BENCH {time.monotonic()}", flush=True)


if __name__ == "__main__":
    main()
