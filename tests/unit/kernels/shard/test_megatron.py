"""Steps under the layouts that Megatron finds equal those of one device; the transfers of a block."""

from __future__ import annotations

import keras
import pytest

from autodist.kernels.shard.reshards import ReshardKind
from autodist.resources import ResourceSpec
from autodist.strategies import Megatron, arranged
from tests.unit.kernels.shard.equal_on_mesh import assert_equal_on_mesh, reshards_of
from tests.unit.kernels.shard.mesh_models import Model, perceptron, table, transformer

SIZES = {"data": 2, "model": 2}
MACHINES = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1, 2, 3], "workers": 4}]})


def layouts_of(model: Model) -> dict[str, str]:
    builder = Megatron(mesh=SIZES)
    strategy = builder.build(model.captured.step, arranged(builder, MACHINES))
    return {one.variable: one.sharding for one in strategy.mesh.variables}


@pytest.mark.usefixtures("keras_in_float64")
def test_a_block_is_summed_twice_forward_and_twice_backward():
    model = transformer(keras.optimizers.SGD(1e-2, momentum=0.9), blocks=2)
    layouts = layouts_of(model)
    without_table = {name: text for name, text in layouts.items() if name != "embed/embeddings"}
    assert reshards_of(model, {"model": 2}, without_table) == {ReshardKind.ALL_REDUCE: 2 * (2 + 2)}
    assert reshards_of(model, {"model": 2}, layouts)[ReshardKind.ALL_REDUCE] == 2 * (2 + 2) + 1


@pytest.mark.usefixtures("keras_in_float64")
def test_a_transformer_equals_one_device():
    model = transformer(keras.optimizers.Adam(1e-2, epsilon=1e-3, global_clipnorm=0.1), lengths=(4, 3, 1))
    assert_equal_on_mesh(model, SIZES, layouts_of(model), 1e-9)


def test_a_perceptron_equals_one_device():
    model = perceptron()
    assert_equal_on_mesh(model, SIZES, layouts_of(model))


def test_a_table_equals_one_device():
    model = table("tied")
    assert_equal_on_mesh(model, SIZES, layouts_of(model))
