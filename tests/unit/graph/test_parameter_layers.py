"""Layers of a model are found by the paths of variables, in the order of use."""

import numpy as np
import pytest
import tensorflow as tf

from autodist.graph.parameter_layers import find_layers, order_of_use
from tests.unit.kernels.in_one_process import capture


def block(path, size=10):
    return {f"{path}/kernel": size, f"{path}/bias": 1}


BLOCKS = {f"block_{k}": block(f"model/block_{k}") for k in range(12)}
NESTED = {name: {**block(f"model/{name}/query", 4), **block(f"model/{name}/up", 6)} for name in BLOCKS}


@pytest.mark.parametrize("blocks", [BLOCKS, NESTED], ids=["flat", "nested"])
def test_a_layer_has_the_variables_below_one_path(blocks):
    sizes = {name: size for one in blocks.values() for name, size in one.items()}
    assert find_layers(sizes) == [tuple(one) for one in blocks.values()]


def test_a_large_variable_is_a_layer_of_its_own():
    layers = find_layers({"model/table": 90, **block("model/a"), **block("model/b")})
    assert layers == [("model/table",), ("model/a/kernel", "model/a/bias"), ("model/b/kernel", "model/b/bias")]


def test_a_large_layer_is_divided():
    sizes = {f"model/all/part_{k}/kernel": 10 for k in range(10)}
    assert find_layers(sizes) == [(name,) for name in sizes]


def test_small_layers_join_their_neighbours():
    sizes = {}
    for k in range(8):
        sizes |= {f"norm_{k}/gamma": 2, **block(f"query_{k}", 4), **block(f"up_{k}", 8)}
    layers = find_layers(sizes)
    assert sum(layers, ()) == tuple(sizes)
    assert layers[0] == ("norm_0/gamma", "query_0/kernel", "query_0/bias")
    assert max(sum(sizes[name] for name in layer) for layer in layers) == 9


def test_joined_layers_do_not_grow_with_their_number():
    sizes = {"table": 1000, **{f"norm_{k}/gamma": 10 for k in range(20)}}
    layers = find_layers(sizes)
    assert layers[0] == ("table", *(f"norm_{k}/gamma" for k in range(6)))
    assert layers[1:] == [(f"norm_{k}/gamma",) for k in range(6, 20)]


def test_variables_are_ordered_by_their_first_use():
    late, early, table, doubled = (tf.Variable(np.ones((4, 4)), name=n) for n in ("late", "early", "table", "doubled"))

    def step(ids):
        rows = tf.tanh(tf.gather(table, ids) @ early)
        return tf.reduce_sum(tf.tanh(rows @ tf.transpose(2.0 * doubled)) @ late)

    order = order_of_use(capture(step, np.zeros(3, np.int32)).step)
    assert sorted(order, key=order.__getitem__) == ["table", "early", "doubled", "late"]
