"""A Keras classifier of handwritten digits, trained by `model.fit`.

The data are 1797 images of 8 × 8 pixels in `digits.npz`, one fifth of them held out as the test set.

    python examples/digits_keras.py                                       # two workers here, all-reduce
    python examples/digits_keras.py --cluster examples/cluster_ps.yml     # two workers here, parameter servers
"""

import argparse
import pathlib

from autodist import AutoDist  # before TensorFlow, to suppress its startup messages

import keras
import numpy as np

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--cluster", default=pathlib.Path(__file__).with_name("cluster.yml"), help="YAML of the machines")
parser.add_argument("--data", default=pathlib.Path(__file__).with_name("digits.npz"), help="images and their labels")
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--weights", help="write the trained weights to this .npz file")
arguments = parser.parse_args()

keras.utils.set_random_seed(1)
with np.load(arguments.data) as digits:
    train_x, test_x = (digits[name].reshape(-1, 8, 8, 1).astype("float32") / 16 for name in ("train_x", "test_x"))
    train_y, test_y = (digits[name].astype("int64") for name in ("train_y", "test_y"))

ad = AutoDist(arguments.cluster)
with ad.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="tanh"),
            keras.layers.Conv2D(32, 3, activation="tanh"),
            keras.layers.Conv2D(64, 3, strides=2, activation="tanh"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(learning_rate=0.05, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(train_x, train_y, batch_size=64, epochs=arguments.epochs, shuffle=True, validation_data=(test_x, test_y))

predicted = model.predict_on_batch(test_x).argmax(axis=1)
if ad.is_chief:
    print(f"test accuracy {np.mean(predicted == test_y):.4f}")
    if arguments.weights:
        np.savez(arguments.weights, **{variable.path: variable.numpy() for variable in model.variables})
