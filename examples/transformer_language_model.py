"""A small transformer that reads and writes character by character, in pipeline stages or on a mesh.

The text is Python's own help (`pydoc_data.topics`). Two blocks see 48 characters and learn to predict the next at each.

    python examples/transformer_language_model.py     # four workers here: two data-parallel pipelines of two stages
    python examples/transformer_language_model.py --cluster examples/cluster_mesh.yml     # or the halves of each layer
"""

import argparse
import pathlib
from pydoc_data.topics import topics

from autodist import AutoDist  # before TensorFlow, to suppress its startup messages

import keras
import numpy as np

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--cluster", default=pathlib.Path(__file__).with_name("cluster_pipeline.yml"), help="YAML of the machines"
)
parser.add_argument("--steps", type=int, default=250)
arguments = parser.parse_args()

LENGTH, BATCH, WIDTH, HEADS, BLOCKS = 48, 32, 64, 4, 2
TOLD = 50  # steps between two printed lines

text = "\n".join(topics.values())
characters, codes = np.unique(list(text), return_inverse=True)
frequency = np.bincount(codes) / len(codes)
unigram_entropy = -np.sum(frequency * np.log(frequency))  # the loss of a model of the characters' frequencies alone


def block(x, name):
    """Applies causal attention and two dense layers, each with a residual connection."""
    normed = keras.layers.LayerNormalization(name=f"{name}_norm_1")(x)
    attention = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"{name}_attention")
    x = keras.layers.add([x, attention(normed, normed, use_causal_mask=True)])
    normed = keras.layers.LayerNormalization(name=f"{name}_norm_2")(x)
    up = keras.layers.Dense(4 * WIDTH, activation="gelu", name=f"{name}_up")(normed)
    return keras.layers.add([x, keras.layers.Dense(WIDTH, name=f"{name}_down")(up)])


keras.utils.set_random_seed(1)
ad = AutoDist(arguments.cluster)
with ad.scope():
    before = keras.Input((LENGTH,), dtype="int32")
    position = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.add(
        [
            keras.layers.Embedding(len(characters), WIDTH, name="embedding")(before),
            keras.layers.Embedding(LENGTH, WIDTH, name="position")(position),
        ]
    )
    for number in range(BLOCKS):
        x = block(x, f"block_{number}")
    after = keras.layers.Dense(len(characters), name="head")(keras.layers.LayerNormalization(name="head_norm")(x))
    model = keras.Model([before, position], after)
    model.compile(keras.optimizers.Adam(0.002), keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    rng = np.random.default_rng(1)  # the same seed on all workers: `fit` takes the global data
    for done in range(0, arguments.steps, TOLD):
        count = min(TOLD, arguments.steps - done)
        starts = rng.integers(len(codes) - LENGTH, size=count * BATCH)
        windows = codes[starts[:, np.newaxis] + np.arange(LENGTH + 1)].astype("int32")
        positions = np.tile(np.arange(LENGTH, dtype="int32"), (len(windows), 1))
        fitted = model.fit([windows[:, :-1], positions], windows[:, 1:], batch_size=BATCH, shuffle=False, verbose=0)
        if ad.is_chief:
            print(f"step {done + count}: loss {fitted.history['loss'][0]:.3f}")

if ad.is_chief:
    loss = fitted.history["loss"][0]
    print(f"loss {loss:.3f} nats a character; the entropy of single characters is {unigram_entropy:.3f}")
    written = list(codes[5000 : 5000 + LENGTH])
    for _ in range(150):
        given = [np.array([written[-LENGTH:]], "int32"), np.arange(LENGTH, dtype="int32")[np.newaxis]]
        logits = model.predict_on_batch(given)[0, -1]
        probabilities = np.exp((logits - logits.max()) / 0.7)
        written.append(rng.choice(len(characters), p=probabilities / probabilities.sum()))
    print("".join(characters[written]))
