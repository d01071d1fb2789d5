"""`evaluate`, `predict` and their kin, beside `fit` with validation, on every worker and on the chief alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.equivalence.cases.base import Array, Results, Trainer, classes, program, values_after_fit

layers = keras.layers


def _model() -> keras.Model:
    words = keras.Input((6,), dtype="int32")
    hidden = layers.GlobalAveragePooling1D()(layers.Embedding(40, 4, mask_zero=True)(words))
    outputs = {"a": layers.Dense(2, name="a")(hidden), "b": layers.Dense(3, "softmax", name="b")(hidden)}
    return keras.Model(words, outputs)


def _data(count: int, seed: int) -> tuple[Array, dict[str, Array], Array]:
    rng = np.random.default_rng(seed)
    words = np.where(np.arange(6) < rng.integers(1, 7, (count, 1)), rng.integers(1, 40, (count, 6)), 0)
    return words.astype("int32"), {"a": rng.normal(size=(count, 2)), "b": classes(rng, count)}, rng.uniform(size=count)


def _require_shared(ad: Trainer, function: Any) -> None:
    assert ad.num_replicas == 1 or function._is_shared, "each worker computed the whole"


@program
def fit_evaluated(ad: Trainer) -> Results:
    x, y, w = _data(53, 1)
    held = _data(29, 2)
    with ad.scope():
        net = _model()
        net.compile(
            keras.optimizers.Adam(0.01),
            {"a": "mse", "b": "sparse_categorical_crossentropy"},
            metrics={"a": ["mae", keras.metrics.R2Score()], "b": ["accuracy"]},
            weighted_metrics={"a": ["mse"], "b": []},
        )
        history = net.fit(x, y, validation_data=held, batch_size=8, epochs=2, shuffle=False, verbose=0)
        _require_shared(ad, net.test_function)
    found: dict[str, Any] = {"evaluated": net.evaluate(*held[:2], batch_size=9, verbose=0)}
    _require_shared(ad, net.test_function)
    data = tf.data.Dataset.from_tensor_slices(held).batch(5).repeat()
    found["evaluated in steps"] = net.evaluate(data, steps=7, verbose=0)
    if ad.is_chief:
        found["worker:of the chief"] = net.evaluate(*held[:2], batch_size=9, verbose=0)
    found |= {f"predicted {name}": rows for name, rows in net.predict(held[0], batch_size=9, verbose=0).items()}
    _require_shared(ad, net.predict_function)

    def endless() -> Iterator[tuple[Array]]:
        while True:
            yield from ((held[0][start : start + 6],) for start in range(0, 29, 6))

    found |= {f"generated {name}": rows for name, rows in net.predict(endless(), steps=6, verbose=0).items()}
    found["of one batch"] = net.test_on_batch(held[0][:3], {k: v[:3] for k, v in held[1].items()})
    found |= {f"one {name}": rows for name, rows in net.predict_on_batch(held[0][:1]).items()}
    own = held[0][ad.worker_index :: ad.num_workers]
    found["worker:own"] = net.predict(own, verbose=0)["a"]
    if ad.num_workers > 1:
        assert net.predict_function._is_shared is False, "workers' own data"
        np.testing.assert_allclose(found["worker:own"], found["predicted a"][ad.worker_index :: ad.num_workers])
    again = net.fit(x, y, sample_weight=w, batch_size=8, shuffle=False, verbose=0)
    if ad.is_chief:
        np.testing.assert_allclose(found["worker:of the chief"], found["evaluated"], rtol=1e-12)
    return values_after_fit(net, again) | {
        **{f"validated {name}": np.array(values) for name, values in history.history.items()},
        **{name: np.array(value) for name, value in found.items()},
    }
