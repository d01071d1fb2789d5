"""`evaluate` and `predict`, and `fit` with validation."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

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
    x, y, _ = _data(53, 1)
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
    found |= {f"predicted {name}": rows for name, rows in net.predict(held[0], batch_size=9, verbose=0).items()}
    _require_shared(ad, net.predict_function)
    return values_after_fit(net, history) | {
        **{name: np.array(value) for name, value in found.items()},
    }
