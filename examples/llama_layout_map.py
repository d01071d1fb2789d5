"""A small Llama of keras-hub that reads and writes character by character, with keras-hub's own layouts.

The text is Python's own help (`pydoc_data.topics`). `LlamaBackbone.get_layout_map` divides each kernel along both axes
of the mesh: along `model`, as Megatron does, and along `batch`, as FSDP does.

    pip install keras-hub
    python examples/llama_layout_map.py     # four workers here: two halves of the batch, two of each layer
"""

import argparse
import pathlib
from pydoc_data.topics import topics

from autodist import AutoDist  # before TensorFlow, to suppress its startup messages

import keras
import keras_hub
import numpy as np

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--cluster", default=pathlib.Path(__file__).with_name("cluster_layout_map.yml"), help="YAML of the machines"
)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--layers", type=int, default=2)
arguments = parser.parse_args()

LENGTH, BATCH, WIDTH = 48, 32, 64
SHOWN = 50  # steps between two printed lines

text = "\n".join(topics.values())
characters, codes = np.unique(list(text), return_inverse=True)
vocabulary = len(characters) + len(characters) % 2  # the axis `model` divides the rows of the embedding


def windows(count, rng):
    """Returns inputs and labels: characters of the text, and for each the next one."""
    starts = rng.integers(len(codes) - LENGTH, size=count)
    tokens = codes[starts[:, np.newaxis] + np.arange(LENGTH + 1)].astype("int32")
    return {"token_ids": tokens[:, :-1], "padding_mask": np.ones((count, LENGTH), "int32")}, tokens[:, 1:]


keras.utils.set_random_seed(1)
ad = AutoDist(arguments.cluster)
with ad.scope():
    places = len(keras.distribution.list_devices())  # the devices of all workers
    if places > 1:  # on one device, Keras has no ModelParallel for TensorFlow
        mesh = keras.distribution.DeviceMesh((places // 2, 2), ["batch", "model"])
        layout_map = keras_hub.models.LlamaBackbone.get_layout_map(mesh)
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
        )

    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=vocabulary,
        num_layers=arguments.layers,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=WIDTH,
        intermediate_dim=3 * WIDTH,
    )
    model = keras_hub.models.LlamaCausalLM(backbone)
    model.compile(
        keras.optimizers.Adam(0.003),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[],
        sampler=keras_hub.samplers.TopKSampler(k=5, temperature=0.7, seed=1),
        jit_compile=False,  # on a CPU, compilation takes longer than this training
    )

    rng = np.random.default_rng(1)  # the same seed on all workers: `fit` takes the global data
    for done in range(0, arguments.steps, SHOWN):
        count = min(SHOWN, arguments.steps - done)
        fitted = model.fit(*windows(count * BATCH, rng), batch_size=BATCH, shuffle=False, verbose=0)
        if ad.is_chief:
            print(f"step {done + count}: loss {fitted.history['loss'][0]:.3f}")

    # On all workers, which hold parts of the model.
    unseen = model.evaluate(*windows(8 * BATCH, rng), batch_size=BATCH, verbose=0)
    prompt = np.zeros((1, 4 * LENGTH), "int32")
    prompt[0, :LENGTH] = codes[5000 : 5000 + LENGTH]
    is_given = (np.arange(4 * LENGTH) < LENGTH).astype("int32")[np.newaxis]
    written = model.generate({"token_ids": prompt, "padding_mask": is_given}, stop_token_ids=None)

if ad.is_chief:
    loss = fitted.history["loss"][0]
    print(f"loss {loss:.3f} nats a character, and {unseen:.3f} of other parts of the text")
    print("".join(characters[written["token_ids"][0] % len(characters)]))
