"""Ops whose results depend on static shapes compute on parts what one device computes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from autodist.kernels.shard.reshards import ReshardKind
from tests.unit.kernels.in_one_process import capture
from tests.unit.kernels.shard.equal_on_mesh import assert_equal_on_mesh, reshards_of
from tests.unit.kernels.shard.mesh_models import Model


def trained(function: Callable[[tf.Variable], tf.Tensor], shape: tuple[int, ...]) -> Model:
    """A step that trains a variable by a function of it and by the batch."""
    rng = np.random.default_rng(0)
    w = tf.Variable(rng.normal(size=shape), name="w")

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x) * tf.reduce_sum(tf.tanh(function(w)) ** 2)
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    batches = [(rng.normal(size=(n, 2)),) for n in (4, 3)]
    return Model(step, capture(step, *batches[0]), batches)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [((2, 1, 4), "[model, –, –]"), ((2, 1, 4), "[–, –, model]"), ((1, 2, 1), "[–, model, –]")],
)
def test_a_squeeze_without_a_list_keeps_dimensions_of_which_a_part_has_length_1(shape, layout):
    model = trained(lambda w: tf.raw_ops.Squeeze(input=w), shape)
    assert_equal_on_mesh(model, {"data": 2, "model": 2}, {"w": layout})
    assert ReshardKind.ALL_GATHER not in reshards_of(model, {"model": 2}, {"w": layout})


@pytest.mark.parametrize(
    ("shape", "layout", "k"),
    [
        ((4, 4, 4), "[–, model, –]", 0),
        ((4, 4, 4), "[–, –, model]", 1),
        ((2, 4, 6), "[model, –, –]", 0),
        ((2, 4, 6), "[–, model, –]", (-1, 1)),
    ],
)
def test_diagonals_of_divided_matrices(shape, layout, k):
    assert_equal_on_mesh(trained(lambda w: tf.linalg.diag_part(w, k=k), shape), {"model": 2}, {"w": layout})


def test_matrices_from_divided_diagonals():
    model = trained(lambda w: tf.linalg.diag(w) + tf.linalg.tensor_diag(tf.linalg.tensor_diag_part(w)), (4, 4))
    assert_equal_on_mesh(model, {"data": 2, "model": 2}, {"w": "[–, model]"}, devices=2)
