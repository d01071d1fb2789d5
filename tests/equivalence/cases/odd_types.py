"""A custom step with variables of many types, scalars, empty ones and unused ones."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.equivalence.cases.base import Results, Trainer, own, program
from tests.unit.kernels.odd_variables import make_odd_step, odd_batches


@program
def step_odd_types(ad: Trainer) -> Results:
    with ad.scope():
        function, variables = make_odd_step()
        step = ad.function(function)
        for (batch,) in odd_batches():
            step(own(ad, batch))
    # NumPy's files have no bfloat16; every bfloat16 value is also a float32 value.
    return {
        v.name: (tf.cast(v, tf.float32) if v.dtype == tf.bfloat16 else tf.convert_to_tensor(v)).numpy()
        for v in variables
    }


@program
def keras_bfloat16_convolutions(ad: Trainer) -> Results:
    """TensorFlow's fused CPU ops for these convolutions are ops that its server does not accept."""
    rng = np.random.default_rng(0)
    images, labels = rng.normal(size=(24, 6, 6, 2)).astype("float32"), rng.integers(0, 3, 24)
    with ad.scope():
        layers = [
            keras.layers.Conv2D(4, 3, activation="relu", dtype="mixed_bfloat16"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(3, dtype="float32"),
        ]
        model = keras.Sequential([keras.Input((6, 6, 2)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        model.fit(images, labels, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return {f"{k}": np.asarray(v) for k, v in enumerate(model.trainable_variables)}
