"""A classifier of handwritten digits with a custom training step: a `GradientTape` in a function.

The data are 1797 images of 8 × 8 pixels in `digits.npz`, one fifth of them held out as the test set.

    python examples/digits_step.py                                       # two workers here, all-reduce
    python examples/digits_step.py --cluster examples/cluster_ps.yml     # two workers here, parameter servers
"""

import argparse
import pathlib

from autodist import AutoDist  # before TensorFlow, to suppress its startup messages

import keras
import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--cluster", default=pathlib.Path(__file__).with_name("cluster.yml"), help="YAML of the machines")
parser.add_argument("--data", default=pathlib.Path(__file__).with_name("digits.npz"), help="images and their labels")
parser.add_argument("--steps", type=int, default=400)
arguments = parser.parse_args()

keras.utils.set_random_seed(1)
with np.load(arguments.data) as digits:
    train_x, test_x = (digits[name].reshape(-1, 64).astype("float32") / 16 for name in ("train_x", "test_x"))
    train_y, test_y = (digits[name].astype("int64") for name in ("train_y", "test_y"))

ad = AutoDist(arguments.cluster)
with ad.scope():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, activation="tanh"),
            keras.layers.Dense(128, activation="tanh"),
            keras.layers.Dense(10),
        ]
    )
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(0.003)

    @ad.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = loss_of(y, logits)
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 1.0)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        right = tf.equal(tf.argmax(logits, axis=1), tf.cast(y, tf.int64))
        return loss, tf.reduce_mean(tf.cast(right, tf.float32))

    rng = np.random.default_rng(1)  # the same seed on all workers, so that all draw the same batches
    for step in range(1, arguments.steps + 1):
        batch = rng.choice(len(train_x), size=64, replace=False)
        batch = np.array_split(batch, ad.num_workers)[ad.worker_index]  # each worker feeds its own part
        loss, accuracy = train_step(train_x[batch], train_y[batch])
        if step % 50 == 0 and ad.is_chief:
            print(f"step {step}: loss {float(loss):.4f}, accuracy {float(accuracy):.4f}")

predicted = model.predict_on_batch(test_x).argmax(axis=1)
if ad.is_chief:
    print(f"test accuracy {np.mean(predicted == test_y):.4f}")
