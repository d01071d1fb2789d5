"""Manual regions: the collectives of the script are the only transfers, and the numbers are those of one device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.manual import all_gather, all_reduce, all_to_all, manual, reduce_scatter
from autodist.errors import StrategyError
from autodist.kernels.shard.reshards import ReshardKind
from tests.unit.kernels.in_one_process import Session, assert_same, capture, one_device, plan
from tests.unit.kernels.shard.equal_on_mesh import assert_equal_on_mesh, reshards_of
from tests.unit.kernels.shard.mesh_models import Model

WHOLE, COLUMNS, ROWS = (None, None), (None, "model"), ("model", None)
LAYOUTS = {"up": "[–, model]", "down": "[model, –]"}


def trained(
    layer: Callable[..., tf.Tensor], lengths: tuple[int, ...] = (8, 7, 1, 5), **shapes: tuple[int, ...]
) -> Model:
    """A step that trains the variables of a layer with momentum."""
    rng = np.random.default_rng(0)
    variables = [tf.Variable(rng.normal(size=shape), name=name) for name, shape in shapes.items()]
    slots = [tf.Variable(np.zeros(shape), name=f"{name}_slot") for name, shape in shapes.items()]

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum((layer(x, *variables) - y) ** 2, 1))
        for variable, slot, gradient in zip(variables, slots, tape.gradient(loss, variables), strict=True):
            slot.assign(0.9 * slot + gradient)
            variable.assign_sub(0.01 * slot)
        return loss

    batches = [(rng.normal(size=(n, 6)), rng.normal(size=(n, 6))) for n in lengths]
    return Model(step, capture(step, *batches[0]), batches)


def perceptron(
    body: Callable[..., tf.Tensor], inputs=(WHOLE, COLUMNS, ROWS), outputs=(WHOLE,), axes=("model",)
) -> Model:
    return trained(manual(body, inputs=inputs, outputs=outputs, axes=axes), up=(6, 8), down=(8, 6))


def by_columns_and_rows(x, up, down):
    return all_reduce(tf.nn.gelu(x @ up) @ down, "model")


@pytest.mark.parametrize(("layouts", "sizes"), [
    ({}, {"model": 2}), (LAYOUTS, {"model": 4}), ({}, {"data": 2, "model": 1}),
    ({}, {"data": 2, "model": 2}), (LAYOUTS, {"data": 2, "model": 2}),
], ids=str)  # fmt: skip
def test_a_perceptron_by_hand_equals_one_device(layouts, sizes):
    assert_equal_on_mesh(perceptron(by_columns_and_rows), sizes, layouts)


def test_a_perceptron_by_hand_has_the_transfers_of_its_layout():
    by_hand = perceptron(by_columns_and_rows)
    by_layout = trained(lambda x, up, down: tf.nn.gelu(x @ up) @ down, up=(6, 8), down=(8, 6))
    expected = reshards_of(by_layout, {"model": 2}, LAYOUTS)
    assert reshards_of(by_hand, {"model": 2}, LAYOUTS) == expected == {ReshardKind.ALL_REDUCE: 1}


def test_weights_that_a_region_gathers_have_divided_gradients():
    def gathered(x, up, down):
        return tf.nn.gelu(x @ all_gather(up, "model", 0)) @ all_gather(down, "model", 1)

    model = perceptron(gathered, inputs=[WHOLE, ROWS, COLUMNS])
    assert_equal_on_mesh(model, {"data": 2, "model": 2}, {"up": "[model, –]", "down": "[–, model]"})
    found = reshards_of(model, {"model": 2}, {"up": "[model, –]", "down": "[–, model]"})
    assert found.keys() == {ReshardKind.ALL_GATHER, ReshardKind.SLICE} and found[ReshardKind.ALL_GATHER] == 2


def test_a_sum_that_is_scattered():
    def body(x, up, down):
        return reduce_scatter(tf.nn.gelu(x @ up) @ down, "model", 1)

    model = perceptron(body, outputs=[COLUMNS])
    assert_equal_on_mesh(model, {"data": 2, "model": 2}, LAYOUTS)
    found = reshards_of(model, {"model": 2}, LAYOUTS)
    assert found[ReshardKind.REDUCE_SCATTER] == 1


EXPERTS, GROUPS, CAPACITY, WIDTH = 4, 4, 3, 6
TOKENS = 4
"""Of a group. Each group may send `CAPACITY` tokens to an expert; others are dropped."""


def mixture(x, gate, up, down):
    """A mixture of experts: groups of tokens are divided, and experts are. Each token goes to one expert."""
    scores = tf.nn.softmax(x @ gate)  # [groups, tokens, experts]
    chosen = tf.one_hot(tf.argmax(scores, -1), EXPERTS, dtype=x.dtype)
    position = tf.cumsum(chosen, axis=1, exclusive=True) * chosen
    slots = tf.one_hot(tf.cast(position, tf.int32), CAPACITY, dtype=x.dtype) * chosen[..., None]
    sent = tf.einsum("gtd,gtec->egcd", x, slots)
    sent = all_to_all(sent, "model", split_axis=0, concat_axis=1)
    sent = tf.reshape(sent, [-1, GROUPS * CAPACITY, WIDTH])
    made = tf.matmul(tf.nn.gelu(tf.matmul(sent, up)), down)
    made = tf.reshape(made, [-1, GROUPS, CAPACITY, WIDTH])
    made = all_to_all(made, "model", split_axis=1, concat_axis=0)
    return tf.einsum("egcd,gtec->gtd", made, slots * scores[..., None])


def experts() -> Model:
    region = manual(
        mixture,
        inputs=[("model",), (), ("model",), ("model",)],
        outputs=[("model",)],
        axes=["model"],
    )

    def layer(x, gate, first, up, down):
        grouped = tf.reshape(tf.tanh(first)[: GROUPS * TOKENS], [GROUPS, TOKENS, WIDTH])
        made = region(grouped, gate, up, down)
        return x @ tf.reshape(made, [-1, WIDTH])[:WIDTH]

    shapes = {"gate": (WIDTH, EXPERTS), "first": (GROUPS * TOKENS, WIDTH)}
    return trained(layer, (4, 3, 1), **shapes, up=(EXPERTS, WIDTH, 8), down=(EXPERTS, 8, WIDTH))


def test_a_mixture_of_experts_takes_two_exchanges_forward_and_two_backward():
    layouts = {"up": "[model, –, –]", "down": "[model, –, –]"}
    model = experts()
    assert reshards_of(model, {"model": 2}, layouts)[ReshardKind.ALL_TO_ALL] == 2 + 2
    assert_equal_on_mesh(model, {"data": 2, "model": 2}, layouts)
    assert_equal_on_mesh(model, {"model": 4}, {})


def test_under_another_strategy_a_region_is_its_function():
    model = perceptron(by_columns_and_rows)
    expected = one_device(model.captured, model.step, model.batches)
    assert_same(Session(model.captured, plan(model.captured.step, workers=2)).train(model.batches), expected)


def test_without_a_step_a_region_calls_its_function():
    x, up, down = tf.ones([2, 6]), tf.ones([6, 8]), tf.ones([8, 6])
    region = manual(by_columns_and_rows, inputs=[WHOLE, COLUMNS, ROWS], outputs=[WHOLE], axes=["model"])
    np.testing.assert_array_equal(region(x, up, down), tf.nn.gelu(x @ up) @ down)


def nested(x, up, down):
    return manual(by_columns_and_rows, inputs=[WHOLE, COLUMNS, ROWS], outputs=[WHOLE], axes=["model"])(x, up, down)


@pytest.mark.parametrize(
    ("body", "options", "problem"),
    [
        (nested, {}, r"is called in a manual region \(ad.manual in test_manual.py:\d+\)"),
        (
            lambda x, up, down: all_reduce(x @ up @ down, "data"),
            {},
            r"ad.all_reduce in test_manual.py:\d+ is over data, but the manual axes .* are model \(ad.manual",
        ),
        (
            by_columns_and_rows,
            {"inputs": [WHOLE, COLUMNS]},
            "inputs has 2 layouts, and there are 3 tensors",
        ),
        (by_columns_and_rows, {"outputs": [WHOLE, WHOLE]}, "outputs has 2 layouts, but 1 tensors return"),
        (by_columns_and_rows, {"outputs": [(None,) * 3]}, "does not fit the tensor .* of the shape"),
        (by_columns_and_rows, {"axes": "model"}, "axes is 'model'; pass the names"),
        (lambda x, up, down: all_gather(x @ up, "model", 2) @ down, {}, "dimension 2 of"),
    ],
)
def test_a_call_that_cannot_be_is_refused_at_once(body, options, problem):
    with pytest.raises(ValueError, match=problem):
        perceptron(body, **options)


def test_a_collective_outside_of_a_region_is_refused():
    with (
        tf.Graph().as_default(),
        pytest.raises(ValueError, match="ad.all_reduce in .* is outside"),
    ):
        all_reduce(tf.zeros([2]), "model")


@pytest.mark.parametrize(
    ("body", "options", "problem"),
    [
        (
            lambda x, up, down: tf.nn.gelu(x @ up) @ down,
            {},
            "An output of the manual region .*needs all_reduce .*model",
        ),
        (
            lambda x, up, down: all_reduce(tf.nn.softmax(x @ up) @ down, "model"),
            {},
            r"Softmax \S+ .*needs all_gather of dimension 1 over model of .*Call ad.all_gather before",
        ),
        (lambda x, up, down: all_reduce(x, "model") @ up @ down, {}, r"ad.all_reduce in test_manual.py:\d+ gets"),
        (lambda x, up, down: all_reduce(x @ up, "model") @ down, {}, r"ad.all_reduce in .* do all_gather"),
        (
            lambda x, up, down: all_gather(x, "model", 1) @ up @ down,
            {},
            r"ad.all_gather in .* do nothing.*region: ad.manual",
        ),
        (by_columns_and_rows, {"axes": ("model", "other")}, "axis other, but the mesh .* has data, model"),
        (by_columns_and_rows, {"axes": ("model", "data")}, "axis data, along which the batch is divided"),
        (by_columns_and_rows, {"inputs": [("model",), COLUMNS, ROWS]}, "depends on the batch"),
        (by_columns_and_rows, {"inputs": [(None, "modle"), COLUMNS, ROWS]}, "has the axis modle, but the mesh"),
        (
            lambda x, up, down: tf.reshape(reduce_scatter(tf.reshape(x @ up @ down, [-1, 2, 3]), "model", 2), [-1, 6]),
            {},
            "divides dimension 2 of .* into 2 parts, but the dimension has the length 3",
        ),
    ],
)
def test_a_region_that_does_not_fit_is_refused_with_its_line(body, options, problem):
    with pytest.raises(StrategyError, match=problem):
        reshards_of(perceptron(body, **options), {"data": 2, "model": 2}, LAYOUTS)


def test_a_region_that_reads_a_divided_variable_is_refused_with_both_places():
    up = tf.Variable(np.ones((6, 8)), name="up")

    def body(x, down):
        return all_reduce(x @ up @ down, "model")

    region = manual(body, inputs=[WHOLE, ROWS], outputs=[WHOLE], axes=["model"])
    model = trained(region, down=(8, 6))
    with pytest.raises(StrategyError, match=r"ad.manual in test_manual.py:\d+\) reads up, .*\[–, model\] \(a test\)"):
        reshards_of(model, {"model": 2}, LAYOUTS)
