"""Layouts of Keras's distributions, translated to shardings as Keras finds them, or refused with their places."""

from __future__ import annotations

import re
from typing import Any

import keras
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from keras.distribution import DeviceMesh, LayoutMap, ModelParallel, TensorLayout

from autodist.capture.keras.distribution.layouts import (
    annotations_of,
    describe_missing,
    key_of,
    layouts_of,
)
from autodist.capture.keras.distribution.run_settings import RunSettings
from autodist.capture.keras.distribution.variables import KerasVariable, keras_variable
from autodist.errors import StrategyError
from autodist.sharding import Mesh, lines_of
from tests.versions import since_keras

FOUR = RunSettings(("cpu:0", "cpu:1", "cpu:2", "cpu:3"), "cluster.yml")
LINE = r"\(test_layouts.py:\d+\)"


def variable(path: str, *shape: int, layout: Any = None) -> KerasVariable:
    return KerasVariable(path, shape, layout)


def layout_map(mesh: DeviceMesh | None = None, **layouts: Any) -> LayoutMap:
    made = LayoutMap(mesh or DeviceMesh((2, 2), ["batch", "model"]))
    for key, layout in layouts.items():
        made[key] = layout
    return made


def of(layouts: LayoutMap, *variables: Any, slots: Any = ()) -> dict[str, str]:
    """Returns the shardings of variables with their origins, as text."""
    found = zip(variables, layouts_of(layouts, FOUR, variables, slots).variables, strict=True)
    return {one.path: "open" if made is None else f"{made.sharding} by {made.origin}" for one, made in found}


def test_axes_divide_dimensions_and_all_others_stay_whole_as_written() -> None:
    layouts = layout_map(**{
        "dense/kernel": (None, "model"),
        ".*/embeddings": ("model", "batch"),
        "norm/scale": (None,),
        "conv/.*": ("model",),
    })  # fmt: skip
    variables = [
        variable("dense/kernel", 6, 4),
        variable("tied/embeddings", 50, 8),
        variable("norm/scale", 8),
        variable("conv/kernel", 4, 3, 4),
        variable("dense/bias", 4),
    ]
    assert of(layouts, *variables) == {
        "dense/kernel": "[–, model] by the layout-map key 'dense/kernel'",
        "tied/embeddings": "[model, batch] by the layout-map key '.*/embeddings'",
        "norm/scale": "[–] by the layout-map key 'norm/scale'",
        "conv/kernel": "[model, –, –] by the layout-map key 'conv/.*'",
        "dense/bias": "open",
    }


def test_the_mesh_and_the_axis_of_the_examples_are_those_of_the_distribution() -> None:
    mesh = DeviceMesh((2, 2), ["data", "model"])
    distribution = ModelParallel(layout_map=layout_map(mesh), batch_dim_name="model")
    found = layouts_of(distribution, FOUR)
    assert (found.mesh, found.batch_axis) == (Mesh.of({"data": 2, "model": 2}), "model")
    assert layouts_of(layout_map(mesh), FOUR).batch_axis == "data"


def test_a_layout_of_the_variable_itself_comes_before_the_keys() -> None:
    layouts = layout_map(**{".*kernel": ("model", None)})
    own = variable("dense/kernel", 6, 4, layout=TensorLayout((None, "model"), layouts.device_mesh))
    assert of(layouts, own) == {"dense/kernel": "[–, model] by the layout of the variable dense/kernel"}
    assert layouts_of(layouts, FOUR, [own]).missing == {}


def test_a_path_as_key_need_not_match_itself() -> None:
    layouts = layout_map(**{"dense(1)/kernel": (None, "model")})
    found = layouts_of(layouts, FOUR, [variable("dense(1)/kernel", 6, 4)])
    assert found.missing == {} and found.variables != (None,)


def test_keys_of_outputs_are_apart_and_are_not_reported() -> None:
    layouts = layout_map(**{".*/output": ("batch", None, "model"), "dense/kernel": (None, "model")})
    found = layouts_of(layouts, FOUR, [variable("dense/kernel", 6, 4)])
    assert {key: str(one.sharding) for key, one in found.outputs.items()} == {".*/output": "[–, –, model]"}
    assert found.missing == {}


@given(
    st.lists(st.sampled_from(["dense/kernel", ".*kernel", "kernel", "dense.*", "dense/(bias|kernel)"]), unique=True),
    st.sampled_from(["dense/kernel", "model/dense/kernel", "dense/bias", "kernel", "dense_1/kernel"]),
)
def test_a_key_is_found_as_keras_finds_it(keys: list[str], path: str) -> None:
    layouts = layout_map(DeviceMesh((1,), ["model"]), **dict.fromkeys(keys, (None, None)))
    try:
        expected = layouts[path]
    except ValueError:
        with pytest.raises(StrategyError, match="which are keys of the LayoutMap"):
            key_of(layouts, path)
        return
    key = key_of(layouts, path)
    assert expected is (None if key is None else layouts[key])


@since_keras("3.14", "keys that match whole paths alone")
def test_a_key_that_matches_nothing_is_reported_with_the_path_that_begins_with_the_models_name() -> None:
    layouts = layout_map(**{"dense/kernel": (None, "model"), "other": ("model",)})
    variables = [variable("sequential/dense/kernel", 6, 4)]
    found = layouts_of(layouts, FOUR, variables)
    assert found.variables == (None,)
    assert {key: str(one.sharding) for key, one in found.missing.items()} == {
        "dense/kernel": "[–, model]",
        "other": "[model]",
    }
    assert [*describe_missing(found, variables)] == [
        "The layout-map key 'dense/kernel' matches no variable. The path sequential/dense/kernel begins with the name "
        "of the model: write '.*/dense/kernel'.",
        "The layout-map key 'other' matches no variable.",
    ]


def test_the_annotations_of_a_step_name_its_variables_as_tensorflow_does() -> None:
    layouts = layout_map(**{"dense.*/kernel": (None, "model"), "absent": ("model",)})
    layers = [keras.layers.Dense(4, name="dense"), keras.layers.EinsumDense("ab,bcd->acd", (2, 3), name="dense")]
    for layer in layers:
        layer.build((None, 6))
    own = tf.Variable(1.0, name="own")
    sources = {"first": layers[0].kernel.value, "second": layers[1].kernel.value, "own": own}
    described = {name: one for name, source in sources.items() if (one := keras_variable(source)) is not None}
    found = annotations_of(layouts, FOUR, described)
    assert found.meshes == {"mesh": Mesh.of({"batch": 2, "model": 2})}
    assert re.fullmatch(r"the DeviceMesh {batch: 2, model: 2} \(test_layouts.py:\d+\)", str(found.mesh_origins["mesh"]))
    assert [*lines_of(found)][1:] == [
        "variable first: [–, model] (the layout-map key 'dense.*/kernel')",
        "variable second: [–, model, –] (the layout-map key 'dense.*/kernel')",
        "missing absent: [model] (the layout-map key 'absent')",
    ]


KERNEL, BIAS = variable("dense/kernel", 6, 4), variable("dense/bias", 4)


def other() -> DeviceMesh:
    return DeviceMesh((4, 1), ["batch", "model"])


FAULTS: dict[str, tuple[Any, str]] = {
    "two keys": (
        lambda: of(layout_map(**{".*kernel": (None, "model"), "dense/k.*": ("model", None)}), KERNEL),
        r"dense/kernel matches '\.\*kernel', 'dense/k\.\*', which are keys of the LayoutMap",
    ),
    "a layout that is too long": (
        lambda: of(layout_map(**{"dense/.*": (None, "model")}), KERNEL, BIAS),
        r"The layout-map key 'dense/\.\*', \(None, 'model'\), has 2 dimensions, and the variable dense/bias has 1 "
        r"\(shape 4\)",
    ),
    "an axis on two dimensions": (
        lambda: of(layout_map(kernel=("model", "model"))),
        r"The layout-map key 'kernel', \('model', 'model'\), divides two dimensions over the axis 'model' of the mesh "
        "{batch: 2, model: 2}",
    ),
    "an axis that the mesh has not": (
        lambda: of(layout_map(), variable("dense/kernel", 6, 4, layout=TensorLayout(("modle", None)))),
        rf"An axis of the layout of the variable dense/kernel is 'modle', and the DeviceMesh {{batch: 2, model: 2}} "
        rf"{LINE} has no such axis. Did you mean model\? Its axes are batch, model",
    ),
    "an axis of the examples that the mesh has not": (
        lambda: layouts_of(ModelParallel(layout_map=layout_map(), batch_dim_name="data"), FOUR),
        r"batch_dim_name of ModelParallel is 'data', and the DeviceMesh .* has no such axis",
    ),
    "two meshes": (
        lambda: of(layout_map(kernel=TensorLayout(("batch", None), other()))),
        rf"The layout-map key 'kernel' has a mesh of its own, the DeviceMesh {{batch: 4, model: 1}} {LINE}. "
        rf"The LayoutMap has the DeviceMesh {{batch: 2, model: 2}} {LINE}",
    ),
    "two meshes, by a variable": (
        lambda: of(layout_map(), variable("dense/bias", 4, layout=TensorLayout(("batch",), other()))),
        "The layout of the variable dense/bias has a mesh of its own",
    ),
    "slots alone": (
        lambda: of(layout_map(**{".*momentum": ("model", None)}), KERNEL, slots=["sgd/kernel_momentum"]),
        r"The layout-map key '\.\*momentum' matches slots of an optimizer alone: sgd/kernel_momentum",
    ),
    "a key that is no pattern": (
        lambda: of(layout_map(**{"dense/(kernel": (None, "model")})),
        r"The layout-map key 'dense/\(kernel' is no regular expression: missing \)",
    ),
    "a layout of the backend": (
        lambda: of(layout_map(), variable("dense/bias", 4, layout="sharded")),
        "The layout of the variable dense/bias is a str; use a tuple of axes",
    ),
    "no mesh": (lambda: layouts_of(LayoutMap(None), FOUR), "The LayoutMap has no mesh"),
    "a mesh of another run": (
        lambda: of(layout_map(DeviceMesh((2,), ["model"]))),
        "has only 2 places, and the run has 4",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_layout_that_is_not_possible_is_refused_with_both_places(fault: str) -> None:
    call, message = FAULTS[fault]
    with pytest.raises(StrategyError, match=message):
        call()


def test_a_mesh_of_its_own_that_is_alike_is_the_same_mesh() -> None:
    alike = DeviceMesh((2, 2), ["batch", "model"], [*FOUR.devices])
    layouts = layout_map(kernel=TensorLayout((None, "model"), alike))
    assert of(layouts, variable("kernel", 6, 4)) == {"kernel": "[–, model] by the layout-map key 'kernel'"}


def test_the_layout_maps_of_keras_hub_cut_kernels_over_both_axes() -> None:
    layouts = layout_map(**{
        "token_embedding/embeddings": ("model", "batch"),
        "transformer_layer.*self_attention.*(query|key|value).kernel": ("model", "batch", None),
        "transformer_layer.*feedforward_gate_dense.kernel": ("batch", "model"),
    })  # fmt: skip
    attention, gate = "transformer_layer_0/self_attention/query/kernel", "transformer_layer_0/feedforward_gate_dense"
    found = layouts_of(layouts, FOUR, [variable(attention, 8, 2, 4), variable(f"{gate}/kernel", 8, 16)])
    assert [str(one and one.sharding) for one in found.variables] == ["[model, batch, –]", "[batch, model]"]
    assert [*found.missing] == ["token_embedding/embeddings"]


def test_parts_of_different_lengths_are_refused_with_the_variable_and_the_key() -> None:
    layouts = layout_map(**{"dense/kernel": (None, "model")})
    with pytest.raises(
        StrategyError, match="key 'dense/kernel'.* dimension of 7 elements of the variable dense/kernel"
    ):
        layouts_of(layouts, FOUR, [variable("dense/kernel", 6, 7)])
