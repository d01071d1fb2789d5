"""A Keras classifier of handwritten digits, trained by `model.fit`.

The data are scikit-learn's 1797 images of 8 × 8 pixels, one fifth of them held out as the test set.

    python examples/digits_keras.py                                       # two workers here, all-reduce
    python examples/digits_keras.py --cluster examples/cluster_ps.yml     # two workers here, parameter servers
"""

import argparse
import pathlib

from autodist import AutoDist  # before TensorFlow, whose messages at its start are left out then

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--cluster", default=pathlib.Path(__file__).with_name("cluster.yml"), help="YAML of the machines")
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--weights", help="write the trained weights to this .npz file")
arguments = parser.parse_args()

keras.utils.set_random_seed(1)
images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, random_state=1, stratify=labels)

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
