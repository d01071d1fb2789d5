"""The shardings of a captured step: of the variables that Keras has made, and of the outputs of layers."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.distribution import DeviceMesh, LayoutMap, ModelParallel, set_distribution

from autodist.capture.gradients import recording_gradients
from autodist.capture.graph_mode import CapturedGraph
from autodist.capture.keras.distribution import run_settings
from autodist.capture.keras.distribution.run_settings import RunSettings, set_run
from autodist.errors import StrategyError
from autodist.graph.step import CapturedStep
from autodist.sharding import Mesh
from tests.unit.kernels.in_one_process import capture

v1 = tf.compat.v1

LAYOUTS = {"up/kernel": (None, "model"), "down/kernel": ("model", None)}
TWO = RunSettings(("cpu:0", "cpu:1"), workers=2, mesh=Mesh.of({"batch": 1, "model": 2}), batch_axis="batch")


@pytest.fixture(autouse=True)
def in_a_run_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_settings, "_current", [TWO])


def model_parallel(**layouts: Any) -> ModelParallel:
    layout_map = LayoutMap(DeviceMesh((1, 2), ["batch", "model"]))
    for key, layout in layouts.items():
        layout_map[key] = layout
    return ModelParallel(layout_map=layout_map)


def layers() -> list[keras.layers.Layer]:
    made: list[keras.layers.Layer] = [keras.layers.Dense(8, name="up"), keras.layers.Dense(2, name="down")]
    for layer, size in zip(made, (6, 8), strict=True):
        layer.build((None, size))
    return made


def captured(up: keras.layers.Layer, down: keras.layers.Layer) -> CapturedStep:
    weights = [*up.trainable_weights, *down.trainable_weights]

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(down(tf.tanh(up(x))) ** 2)
        for weight, gradient in zip(weights, tape.gradient(loss, [one.value for one in weights]), strict=True):
            weight.value.assign_sub(0.1 * gradient)
        return loss

    return capture(step, np.ones((3, 6), "float32")).step


def test_a_step_has_the_layouts_under_which_its_variables_were_made_also_after_the_scope() -> None:
    with model_parallel(**LAYOUTS).scope():
        made = layers()
    found = captured(*made).annotations
    assert found is not None
    assert {name: (str(one.sharding), str(one.origin)) for name, one in found.variables.items()} == {
        "up/kernel": ("[–, model]", "the layout-map key 'up/kernel'"),
        "down/kernel": ("[model, –]", "the layout-map key 'down/kernel'"),
    }
    set_run(RunSettings(("cpu:0",), is_reference=True))
    assert captured(*made).annotations is None


def test_a_step_without_a_distribution_has_no_annotations() -> None:
    assert captured(*layers()).annotations is None


def test_variables_that_were_made_before_the_distribution_are_refused() -> None:
    made = layers()
    set_distribution(model_parallel(**LAYOUTS))
    with pytest.raises(StrategyError, match="The variable (up|down)/.* was made before keras.distribution's ModelPara"):
        captured(*made)


def test_variables_of_two_distributions_are_refused() -> None:
    with model_parallel(**LAYOUTS).scope():
        up, _ = layers()
    with model_parallel(**LAYOUTS).scope():
        _, down = layers()
    with pytest.raises(StrategyError, match="A step has variables of two distributions of Keras"):
        captured(up, down)


def test_a_key_of_an_output_is_a_constraint_of_it_and_of_its_gradient() -> None:
    set_distribution(model_parallel(**LAYOUTS, **{"up/output": ("batch", "model")}))
    step = captured(*layers())
    assert step.annotations is not None
    shown = {(str(one.sharding), str(one.origin)) for one in step.annotations.constraints.values()}
    assert shown == {("[–, model]", "the layout-map key 'up/output'")}
    marked = [step.graph_index.nodes[name] for name in step.annotations.constraints]
    assert [node.op for node in marked] == ["Identity", "Identity"]


@pytest.mark.parametrize(
    "layout, fault",
    [((None, "batch"), "divides another dimension of an output than the first"), ((None,) * 3, "of 3 dimensions for")],
)
def test_a_layout_that_an_output_cannot_have_is_refused(layout: Any, fault: str) -> None:
    set_distribution(model_parallel(**{"up/output": layout}))
    with pytest.raises(Exception, match=f"StrategyError: The layout-map key 'up/output' .*{fault}"):
        captured(*layers())


def test_a_layout_within_a_loop_is_refused() -> None:
    set_distribution(model_parallel(**LAYOUTS, **{"up/output": (None, "model")}))
    up, _ = layers()

    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda k, _: k < 2, lambda k, s: (k + 1, s + up(x)), (0, tf.zeros((3, 8))))[1]

    with pytest.raises(StrategyError, match="within the function .*such as the body of a loop"):
        capture(step, np.ones((3, 6), "float32"))


def graph_of_variables() -> CapturedGraph:
    """A graph of TensorFlow 1 with a layer of its own variables, and one of Keras."""
    with tf.Graph().as_default() as graph, recording_gradients(in_functions=False) as notes:
        x = v1.placeholder(tf.float32, [None, 6])
        hidden = tf.tanh(x @ v1.get_variable("up/kernel", [6, 8]))
        down = keras.layers.Dense(2, name="down")
        v1.train.AdamOptimizer().minimize(tf.reduce_mean(down(hidden) ** 2), name="train")
        return CapturedGraph.of(graph, notes.calls)


@pytest.mark.feature("session", "step: `keras.distribution.ModelParallel`")
def test_a_session_has_layouts_of_variables_by_their_names_and_by_the_paths_of_keras() -> None:
    with model_parallel(**LAYOUTS).scope():
        graph = graph_of_variables()
        whole, step = graph.whole().annotations, graph.step([], ["train"], {"Placeholder:0": 0}).annotations
    assert whole is not None and step is not None
    shardings = {name: str(one.sharding) for name, one in whole.variables.items()}
    assert shardings == {"up/kernel": "[–, model]", "down/kernel": "[model, –]"}
    assert step.variables == whole.variables
    reading = graph.step(["Tanh:0"], [], {"Placeholder:0": 0}).annotations
    assert reading is not None and {*reading.variables} == {"up/kernel"}


def test_slots_of_a_session_follow_their_variables_and_a_key_of_slots_alone_is_refused() -> None:
    with model_parallel(**{".*/kernel(/Adam.*)?": (None, "model")}).scope():
        found = graph_of_variables().whole().annotations
    assert found is not None and {*found.variables} == {"up/kernel", "down/kernel"}
    with (
        model_parallel(**{"up/kernel/Adam": (None, "model")}).scope(),
        pytest.raises(StrategyError, match="'up/kernel/Adam' matches slots of an optimizer alone: up/kernel/Adam"),
    ):
        graph_of_variables().whole()


def test_a_session_with_keras_variables_of_an_earlier_time_is_refused() -> None:
    graph = graph_of_variables()
    set_distribution(model_parallel(**LAYOUTS))
    with pytest.raises(StrategyError, match="The variable down/.* was made before keras.distribution's ModelPara"):
        graph.whole()
