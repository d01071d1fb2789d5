"""Measures one worker's processor time for reading each example that it trains on, alone and as one of many.

    python -m bench.read_data 1 2 8

No worker is started: this process reads the data of worker i of N. Prints, as JSON, for each way to read and each N,
the microseconds of processor time for each of the worker's own examples: the larger of the first and the last worker's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from autodist.batch.examples import rows_to_read
from autodist.capture.keras.own_batches import own_arrays
from autodist.reading.batch_sharding import OwnRows
from autodist.reading.element_sharding import own_elements
from autodist.runtime.sampler import Sampler

EXAMPLES, BATCH, SIDE, EPOCHS = 2048, 256, 96, 3
_PIXELS = (SIDE, SIDE, 3)

Read = Callable[[int, int], Iterable[Any]]
"""Returns the data of worker i of N; each iteration is an epoch."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workers", type=int, nargs="+")
    figures = {
        name: {
            workers: max(_cost(read, w, workers) for w in {0, workers - 1}) for workers in parser.parse_args().workers
        }
        for name, read in _ways().items()
    }
    print(json.dumps(figures))


def _cost(read: Read, worker: int, workers: int) -> float:
    """Returns the minimum over some epochs, each from its second batch on: its start takes as long on one device."""
    found, batches = [], read(worker, workers)
    for _ in range(EPOCHS):
        epoch = iter(batches)
        next(epoch)
        examples, began = 0, time.process_time()
        for batch in epoch:
            examples += int(np.shape(tf.nest.flatten(batch)[0])[0])
        found.append((time.process_time() - began) / examples * 1e6)
    return min(found)


def _ways() -> dict[str, Read]:
    draws = np.random.default_rng(0)
    images = draws.random((EXAMPLES, *_PIXELS), "float32")
    encoded = [tf.io.encode_jpeg(tf.cast(image * 255, tf.uint8)).numpy() for image in images[:64]] * (EXAMPLES // 64)

    def arrays(worker: int, workers: int) -> Iterable[Any]:
        own = own_arrays(ArrayDataAdapter(images, batch_size=BATCH, shuffle=True), _rows(worker, workers))
        assert own is not None, "they are arrays"
        return own

    shuffled = tf.data.Dataset.from_tensor_slices(encoded).shuffle(EXAMPLES, seed=1)
    mapped = shuffled.map(_decode, tf.data.AUTOTUNE).batch(BATCH)

    def elements(worker: int, workers: int) -> Iterable[Any]:
        own = own_elements(mapped, _rows(worker, workers)).own
        assert own is not None, "nothing in it keeps a worker from that"
        return own

    def records(worker: int, workers: int) -> Iterable[Any]:
        return _Records(Sampler(EXAMPLES, BATCH, 1, False, range(workers), worker), encoded)

    return {"arrays in fit": arrays, "tf.data, decoding images": elements, "ad.sampler, decoding images": records}


class _Records:
    """Decodes the records that a sampler selects."""

    def __init__(self, sampler: Sampler, encoded: Sequence[bytes]) -> None:
        self._sampler, self._encoded = sampler, encoded

    def __iter__(self) -> Iterator[Any]:
        for numbers in self._sampler:
            yield np.stack([_decode(self._encoded[number]).numpy() for number in numbers])


def _rows(worker: int, workers: int) -> OwnRows:
    return rows_to_read(range(workers), worker)


def _decode(encoded: Any) -> tf.Tensor:
    return tf.cast(tf.io.decode_jpeg(encoded, 3), tf.float32) / 255


if __name__ == "__main__":
    main()
