"""Models of keras-hub on two workers, with their own layout maps, compute as on one device: from weights to files."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

LIMIT = 240.0

CAST = keras.ops.cast


def in_float64(x: Any, dtype: Any) -> Any:
    """Casts x, unless that would lose digits: keras-hub computes norms and softmax in float32, whatever the dtype."""
    return x if dtype == "float32" and getattr(x, "dtype", "") == "float64" else CAST(x, dtype)


def made(task: Any, backbone: Any) -> Any:
    """Returns a compiled model, whose gradients are applied after every second step."""
    model = task(backbone)
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Softmax):
            layer.dtype_policy = "float64"
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
    model.compile(optimizer, loss, weighted_metrics=["accuracy"], sampler="greedy", jit_compile=False)
    return model


def llama() -> Any:
    keras.utils.set_random_seed(3)
    sizes = {"num_query_heads": 4, "num_key_value_heads": 2, "hidden_dim": 8, "intermediate_dim": 12}
    backbone = keras_hub.models.LlamaBackbone(vocabulary_size=14, num_layers=1, **sizes)
    return made(keras_hub.models.LlamaCausalLM, backbone)


def gemma() -> Any:
    """The second generation: it bounds its logits, and its head is the embedding."""
    keras.utils.set_random_seed(4)
    sizes = {"num_query_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "hidden_dim": 8, "intermediate_dim": 24}
    bounds = {"attention_logit_soft_cap": 5.0, "final_logit_soft_cap": 3.0}
    norms = {"use_post_ffw_norm": True, "use_post_attention_norm": True}
    backbone = keras_hub.models.GemmaBackbone(vocabulary_size=14, num_layers=1, **sizes, **bounds, **norms)
    return made(keras_hub.models.GemmaCausalLM, backbone)


def inputs(count: int) -> dict[str, np.ndarray]:
    """Returns token IDs; the last position of every second example is padding."""
    ids = np.random.default_rng(1).integers(0, 14, (count, 7)).astype("int32")
    mask = np.ones((count, 7), "int32")
    mask[::2, -1] = 0
    return {"token_ids": ids, "padding_mask": mask}


def fit(model: Any, epochs: int) -> dict[str, Any]:
    """Trains; returns the history and the weights."""
    x = inputs(11)
    labels = np.roll(x["token_ids"], -1, 1)
    weights = x["padding_mask"].astype("float64")
    fitted = model.fit(x, labels, batch_size=4, epochs=epochs, shuffle=False, sample_weight=weights, verbose=0)
    results = {name: np.asarray(values) for name, values in fitted.history.items()}
    return results | {f"weight_{k}": value for k, value in enumerate(model.get_weights())}


def use(model: Any) -> dict[str, Any]:
    """Predicts and generates."""
    x = inputs(11)
    mask = (np.arange(7) < 3).astype("int32") * np.ones((3, 1), int)
    prompt = {"token_ids": x["token_ids"][:3], "padding_mask": mask}
    generated = model.generate(prompt, stop_token_ids=None)["token_ids"]
    return {"predicted": model.predict(x, batch_size=4, verbose=0), "generated": generated}


def begin(ad: Any, folder: str) -> dict[str, Any]:
    """Trains a Llama from weights in a file, and saves it in all ways."""
    model = llama()
    model.load_weights(f"{folder}/pretrained.weights.h5")
    results = fit(model, 1) | use(model)
    ad.checkpoint(f"{folder}/checkpoints", model=model).save()
    model.save(f"{folder}/saved.keras")
    model.save_weights(f"{folder}/saved.weights.h5")
    model.export(f"{folder}/exported", verbose=False)
    return results


def resume(ad: Any, folder: str) -> dict[str, Any]:
    """Continues the training of the Llama, from the checkpoint of another mesh."""
    model = llama()
    ad.checkpoint(f"{folder}/checkpoints", model=model).restore()
    return fit(model, 1)


def other(ad: Any, folder: str) -> dict[str, Any]:
    """Trains a Gemma, and generates with it."""
    model = gemma()
    return fit(model, 2) | use(model)


FUNCTIONS = [in_float64, made, llama, gemma, inputs, fit, use, begin, resume, other]

SCRIPT = """
from typing import Any
from unittest import mock
import keras
import keras_hub
from keras.distribution import DeviceMesh, ModelParallel
CAST = keras.ops.cast
{functions}
keras.config.set_floatx("float64")
with ad.scope(), mock.patch.object(keras.ops, "cast", in_float64):
    mesh = DeviceMesh({shape}, {axes})
    kept = {{}}
    for function, backbone in ({runs}):
        layout_map = backbone.get_layout_map(mesh)
        with ModelParallel(layout_map=layout_map, batch_dim_name="batch").scope():
            results = function(ad, {folder!r})
        kept |= {{f"{{function.__name__}}_{{name}}": value for name, value in results.items()}}
    keep(**kept)
"""


@pytest.fixture(scope="module", autouse=True)
def _float64() -> Iterator[None]:
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    with mock.patch.object(keras.ops, "cast", in_float64):
        yield
    keras.config.set_floatx(before)


def on_mesh(path: Path, folder: Path, mesh: dict[str, int], cpus: int, runs: str) -> Training:
    """Runs functions on two workers; returns the run, which has ended."""
    strategy = {"builder": "Mesh", "mesh": mesh, "data": "batch"}
    spec = {"nodes": [{"address": "localhost", "cpus": [*range(cpus)], "workers": 2}], "strategy": strategy}
    sources = "\n".join(map(inspect.getsource, FUNCTIONS))
    about = {"shape": tuple(mesh.values()), "axes": [*mesh], "runs": runs, "folder": str(folder)}
    with Training(path, SCRIPT.format(functions=sources, **about), spec) as run:
        assert run.wait(LIMIT) == 0, run.stderr
        run.assert_gone()
    assert "matches no" not in run.stderr
    return run


@dataclass(frozen=True)
class Begun:
    """A run that has trained a Llama from weights in a file, and saved it; and the same model on one device."""

    folder: Path
    run: Training
    expected: dict[str, Any]
    alone: Any


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, _float64: None) -> Begun:
    """Each worker has two devices, which differ on `model`; the layout map divides kernels over both workers too."""
    folder = tmp_path_factory.mktemp("folder")
    alone = llama()
    alone.set_weights([np.cos(np.arange(w.size) + w.ndim).reshape(w.shape) / 3 for w in alone.get_weights()])
    alone.save_weights(folder / "pretrained.weights.h5")
    runs = "(begin, keras_hub.models.LlamaBackbone),"
    run = on_mesh(tmp_path_factory.mktemp("run"), folder, {"batch": 2, "model": 2}, 4, runs)
    return Begun(folder, run, fit(alone, 1) | use(alone), alone)


def test_a_llama_from_a_file_trains_and_generates_as_on_one_device_and_its_files_have_its_weights(begun: Begun) -> None:
    begun.run.assert_kept(2, named("begin", begun.expected))
    weights = [value for name, value in begun.expected.items() if name.startswith("weight")]
    model = llama()
    model.optimizer.build(model.trainable_variables)
    for name in ("saved.weights.h5", "saved.keras"):
        model.set_weights([np.zeros_like(one) for one in weights])
        model.load_weights(begun.folder / name)
        for one, value in zip(model.get_weights(), weights, strict=True):
            np.testing.assert_allclose(one, value, rtol=1e-9, atol=1e-12)
    exported = tf.saved_model.load(begun.folder / "exported")  # it owns the variables
    served = exported.serve({name: tf.constant(value) for name, value in inputs(11).items()})
    np.testing.assert_allclose(served, begun.expected["predicted"], rtol=1e-9, atol=1e-12)


def test_a_checkpoint_of_one_mesh_continues_on_another_and_a_gemma_trains_as_on_one_device(
    begun: Begun, tmp_path: Path
) -> None:
    runs = "(resume, keras_hub.models.LlamaBackbone), (other, keras_hub.models.GemmaBackbone)"
    run = on_mesh(tmp_path, begun.folder, {"batch": 1, "model": 2}, 2, runs)
    model = gemma()
    run.assert_kept(2, named("resume", fit(begun.alone, 1)) | named("other", fit(model, 2) | use(model)))


def named(function: str, results: dict[str, Any]) -> dict[str, Any]:
    """Returns the results under the names that a function's have in `SCRIPT`."""
    return {f"{function}_{name}": value for name, value in results.items()}
