"""Megatron: the layouts that it finds in the graph of a step, and steps in which it finds none."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import StrategyError
from autodist.resources import ResourceSpec
from autodist.strategies import Megatron, Mesh, arranged, builder_from_section, check_strategy
from autodist.strategies.mesh_table import part_rows, requested_figures
from tests.unit.kernels.in_one_process import capture
from tests.unit.kernels.shard.mesh_models import LENGTH, MEGATRON, TOKENS, Model, perceptron, table, transformer

layers = keras.layers


def strategy_of(model: Model, machines: ResourceSpec, **options):
    builder = Megatron(**options)
    spec = arranged(builder, machines)
    strategy = builder.build(model.captured.step, spec)
    check_strategy(strategy, model.captured.step, spec)
    return strategy


def found(model: Model, machines: ResourceSpec, **options) -> tuple[dict[str, str], dict[str, str]]:
    """The layouts of divided variables, and the reasons of the others."""
    both = strategy_of(model, machines, **options).mesh.variables
    divided = {one.variable: one.sharding for one in both if "model" in one.sharding}
    return divided, {one.variable: one.origin for one in both if one.variable not in divided}


def of_layers(made: keras.Model, x: np.ndarray, y: np.ndarray) -> Model:
    """A step of a model of Keras, with the mean of squares or the cross entropy as its loss."""
    loss_of = (
        keras.losses.MeanSquaredError()
        if y.dtype.kind == "f"
        else keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(made.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, made(x, training=True))
        optimizer.apply(tape.gradient(loss, made.trainable_variables), made.trainable_variables)
        return loss

    return Model(step, capture(step, x, y), [(x, y)])


def dense(count: int, width: int = 8) -> Model:
    hidden = [layers.Dense(width, "relu", name=f"d{k}") for k in range(count)]
    made = keras.Sequential([layers.Input((width,)), *hidden], name="chain")
    return of_layers(made, np.ones((2, width), "float32"), np.ones((2, width), "float32"))


def of_tokens(*after: keras.layers.Layer) -> Model:
    made = keras.Sequential([layers.Input((LENGTH,)), layers.Embedding(TOKENS, 8, name="embed"), *after], name="words")
    return of_layers(made, np.zeros((2, LENGTH), "int32"), np.zeros((2,), "int32"))


def test_a_transformer_gets_the_layout_that_one_writes_by_hand(cluster):
    model = transformer(keras.optimizers.SGD(0.1), blocks=2)
    layouts, whole = found(model, cluster(4), mesh={"data": 2, "model": 2})
    assert layouts == model.layouts({**MEGATRON, "embed/embeddings": "[model, –]"})
    assert whole.keys() == {"head/kernel"}
    assert whole["head/kernel"].startswith("Megatron: SparseSoftmaxCrossEntropyWithLogits of")


def test_the_strategy_is_that_of_a_mesh_with_these_layouts(cluster):
    model = perceptron()
    strategy = strategy_of(model, cluster(2))
    by_hand = Mesh(mesh={"model": 2}, layouts={"w1": (None, "model"), "w2": ("model",)})
    expected = by_hand.build(model.captured.step, arranged(by_hand, cluster(2)))
    assert [one.origin for one in strategy.mesh.variables] == ["Megatron: columns", "Megatron: rows"]
    strategy.builder = "Mesh"
    for one, other in zip(strategy.mesh.variables, expected.mesh.variables, strict=True):
        one.origin = other.origin
    assert strategy == expected


def test_every_second_matrix_of_a_chain_begins_a_pair(cluster):
    layouts, whole = found(dense(5), cluster(2))
    names = {f"chain/d{k}/kernel": text for k, text in enumerate(["[–, model]", "[model, –]"] * 2)}
    assert layouts == names
    assert whole == {"chain/d4/kernel": "Megatron: a matrix next to it is divided"}


def test_wide_layers_come_before_the_chain_of_their_inputs(cluster):
    """Without normalization, the sum that passes all layers is a chain, too."""
    first = x = layers.Input((8,))
    x = layers.Dense(8, name="first")(x)
    for k in range(2):
        x = layers.Add()([x, layers.Dense(8, name=f"down{k}")(layers.Dense(32, "gelu", name=f"up{k}")(x))])
    model = of_layers(keras.Model(first, x), np.ones((2, 8), "float32"), np.ones((2, 8), "float32"))
    layouts, _ = found(model, cluster(2))
    assert layouts == {
        f"{k}/kernel": v for n in "01" for k, v in ((f"up{n}", "[–, model]"), (f"down{n}", "[model, –]"))
    }


def test_a_gate_and_the_layer_that_it_multiplies_are_divided_alike(cluster):
    x = layers.Input((8,))
    h = layers.Multiply()([layers.Dense(32, "silu", name="gate")(x), layers.Dense(32, name="up")(x)])
    model = of_layers(
        keras.Model(x, layers.Dense(8, name="down")(h)), np.ones((2, 8), "float32"), np.ones((2, 8), "float32")
    )
    layouts, _ = found(model, cluster(2))
    assert layouts == {"gate/kernel": "[–, model]", "up/kernel": "[–, model]", "down/kernel": "[model, –]"}


def grouped_attention() -> Model:
    x = layers.Input((LENGTH, 8))
    y = layers.LayerNormalization()(x)
    y = layers.GroupQueryAttention(4, 4, 2, dropout=0.1, flash_attention=False, name="att")(y, y, use_causal_mask=True)
    made = keras.Model(x, layers.LayerNormalization()(layers.Add()([x, y])))
    return of_layers(made, np.ones((2, LENGTH, 8), "float32"), np.ones((2, LENGTH, 8), "float32"))


def test_heads_that_share_keys_are_divided_with_them(cluster):
    layouts, _ = found(grouped_attention(), cluster(2))
    columns = {f"att/{name}/kernel": "[–, model, –]" for name in ("query", "key", "value")}
    assert layouts == {**columns, "att/attention_output/kernel": "[model, –, –]"}


def test_keys_that_do_not_divide_keep_their_heads_whole(cluster):
    with pytest.raises(StrategyError, match="att/query/kernel: 2 is not divisible by 4"):
        found(grouped_attention(), cluster(4))


@pytest.mark.parametrize("update", ["rows", "dense", "tied"])
def test_a_table_is_divided_along_its_rows(cluster, update):
    layouts, whole = found(table(update), cluster(2))
    assert layouts == {"rows": "[model, –]"}
    assert whole == {"w": "Megatron: a matrix next to it is divided"}


def test_positions_are_no_vocabulary(cluster):
    class Positions(keras.layers.Layer):
        def build(self, shape):
            self.table = layers.Embedding(LENGTH, 8, name="position")
            self.table.build(())

        def call(self, x):
            return x + self.table(tf.range(tf.shape(x)[1]))

    model = of_tokens(Positions(name="positions"), layers.LayerNormalization(), layers.Flatten())
    layouts, whole = found(model, cluster(2))
    assert layouts == {"words/embed/embeddings": "[model, –]"}
    assert any("position" in name for name in whole)


def test_a_loop_stays_whole(cluster):
    layouts, whole = found(of_tokens(layers.LSTM(8, name="lstm"), layers.Dense(TOKENS, name="head")), cluster(2))
    assert layouts == {"words/embed/embeddings": "[model, –]"}
    assert whole.keys() == {"words/head/kernel"}


def test_a_layout_by_hand_comes_first(cluster):
    layouts, whole = found(dense(4), cluster(2), layouts={"chain/d0/kernel": ("model",)})
    assert [layouts[f"chain/d{k}/kernel"] for k in range(3)] == ["[model, –]", "[–, model]", "[model, –]"]
    assert whole == {"chain/d3/kernel": "Megatron: a matrix next to it is divided"}


def test_the_plan_shows_why_a_matrix_stays_whole(cluster):
    model = dense(3)
    strategy = strategy_of(model, cluster(2))
    rows = {row[0]: row for row in part_rows(requested_figures(strategy, model.captured.step))}
    assert rows["chain/d0/kernel"][3:5] == ["[–, model]", "Megatron: columns"]
    assert rows["chain/d2/kernel"][3:5] == ["whole", "Megatron: a matrix next to it is divided"]


def test_a_step_without_pairs_is_refused_with_the_reasons(cluster):
    with pytest.raises(StrategyError) as refused:
        found(dense(2, width=9), cluster(2))
    assert "the axis 'model' of size 2 divides" in str(refused.value)
    assert "chain/d0/kernel: 9 is not divisible by 2" in str(refused.value)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("mesh: {data: 2}", r"yml:\d.* along the axis 'model', and the batch along 'data'"),
        ("mesh: {data: 1, model: 2}\n  model: data", r"yml:\d.* along the axis 'data', and the batch along 'data'"),
        ("mesh: {model: 3}", "has 3 places, but the workers have 2 devices"),
        ("mesh: {model: 2}\n  variables: {w: {sharding: [modle]}}", "the mesh has the axes model"),
    ],
)
def test_a_wrong_option_is_refused_with_its_line(tmp_path, options, problem):
    path = tmp_path / "cluster.yml"
    nodes = "nodes: [{address: localhost, cpus: [0, 1], workers: 2}]"
    path.write_text(f"{nodes}\nstrategy:\n  builder: Megatron\n  {options}\n")
    spec = ResourceSpec.from_file(path)
    with pytest.raises(StrategyError, match=problem):
        arranged(builder_from_section(spec.strategy), spec)
