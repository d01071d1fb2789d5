"""A language model that reads and writes character by character, trained by a custom training step.

The text is Python's own help (`pydoc_data.topics`). A GRU sees 40 characters and learns to predict the next one at
each.

    python examples/char_language_model.py                                           # two workers here, all-reduce
    python examples/char_language_model.py --cluster examples/cluster_parallax.yml   # the table on a parameter server
"""

import argparse
import pathlib
from pydoc_data.topics import topics

from autodist import AutoDist  # before TensorFlow, to suppress its startup messages

import keras
import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--cluster", default=pathlib.Path(__file__).with_name("cluster.yml"), help="YAML of the machines")
parser.add_argument("--steps", type=int, default=600)
arguments = parser.parse_args()

LENGTH, BATCH = 40, 64

text = "\n".join(topics.values())
characters, codes = np.unique(list(text), return_inverse=True)
frequency = np.bincount(codes) / len(codes)
unigram_entropy = -np.sum(frequency * np.log(frequency))  # the loss of a model of the characters' frequencies alone

keras.utils.set_random_seed(1)
ad = AutoDist(arguments.cluster)
with ad.scope():
    model = keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            keras.layers.Embedding(len(characters), 32),
            keras.layers.GRU(128, return_sequences=True),
            keras.layers.Dense(len(characters)),
        ]
    )
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(0.005)

    @ad.function
    def train_step(before, after):
        with tf.GradientTape() as tape:
            loss = loss_of(after, model(before, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    rng = np.random.default_rng(1)  # the same seed on all workers, so that all draw the same batches
    losses = []
    for step in range(1, arguments.steps + 1):
        starts = rng.integers(len(codes) - LENGTH, size=BATCH)
        starts = np.array_split(starts, ad.num_workers)[ad.worker_index]  # each worker feeds its own part
        window = codes[starts[:, np.newaxis] + np.arange(LENGTH + 1)].astype("int32")
        losses.append(float(train_step(window[:, :-1], window[:, 1:])))
        if step % 50 == 0 and ad.is_chief:
            print(f"step {step}: loss {np.mean(losses[-50:]):.3f}")

if ad.is_chief:
    print(
        f"loss {np.mean(losses[-50:]):.3f} nats a character; the entropy of single characters is {unigram_entropy:.3f}"
    )
    written = list(codes[5000 : 5000 + LENGTH])
    for _ in range(200):
        logits = model.predict_on_batch(np.array([written[-LENGTH:]], "int32"))[0, -1]
        probabilities = np.exp((logits - logits.max()) / 0.7)
        written.append(rng.choice(len(characters), p=probabilities / probabilities.sum()))
    print("".join(characters[written]))
