"""Small models for drawn shardings, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import keras
import tensorflow as tf

from autodist.capture.sharding_marks import constrain
from autodist.sharding import Layout
from tests.unit.kernels.in_one_process import Trained, assert_same
from tests.unit.kernels.shard import drawn_layers as layers
from tests.unit.kernels.shard import drawn_ops as ops
from tests.unit.kernels.shard import drawn_programs as programs
from tests.unit.kernels.shard.drawn_steps import DrawnModel, inputs, made, trained, variable

MODELS: dict[str, Callable[[], DrawnModel]] = {
    "sgd": lambda: layers.dense(lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)),
    "adam": lambda: layers.dense(lambda: keras.optimizers.Adam(0.01, epsilon=1e-3, amsgrad=True)),
    "adamw": lambda: layers.dense(lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-3, use_ema=True)),
    "ema": lambda: layers.dense(lambda: keras.optimizers.SGD(0.01, use_ema=True, ema_overwrite_frequency=2)),
    "adafactor": lambda: layers.dense(lambda: keras.optimizers.Adafactor(0.01, epsilon_1=1e-3)),
    "norm": lambda: layers.dense(lambda: keras.optimizers.SGD(0.05, clipnorm=0.1)),
    "global norm": lambda: layers.dense(lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1, epsilon=1e-3)),
    "rmsprop": lambda: layers.dense(lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True, clipvalue=0.1)),
    "convolutions": layers.convolutions,
    "whole norms": layers.whole_norms,
    "lstm": lambda: layers.recurrent(keras.layers.LSTM),
    "gru": lambda: layers.recurrent(keras.layers.GRU),
    "attention": layers.attention,
    "dropout": layers.dropout,
    "tied embeddings": ops.tied_embeddings,
    "gathers": ops.gathers,
    "reductions": ops.reductions,
    "loss scaling": ops.loss_scaling,
    "chosen update": ops.chosen_update,
    "returned": ops.returned,
    "loop": ops.loop,
    "shapes": ops.shapes,
    "table adam": lambda: layers.embedding(lambda: keras.optimizers.Adam(0.01, epsilon=1e-3)),
    "table rmsprop": lambda: layers.embedding(lambda: keras.optimizers.RMSprop(0.01, clipvalue=0.01)),
    "table norm": lambda: layers.embedding(lambda: keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.1)),
    "table global norm": lambda: layers.embedding(lambda: keras.optimizers.Adagrad(0.05, global_clipnorm=0.1)),
    "accumulated": lambda: layers.dense(lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)),
    "lamb": lambda: layers.dense(lambda: keras.optimizers.Lamb(0.01)),
    "muon": lambda: layers.dense(lambda: keras.optimizers.Muon(0.01)),
    "nadam": lambda: layers.dense(lambda: keras.optimizers.Nadam(0.01, epsilon=1e-3)),
    "lion": lambda: layers.dense(lambda: keras.optimizers.Lion(0.01)),
    "scaled": layers.scaled,
    "regularized": layers.regularized,
    "bidirectional": layers.bidirectional,
    "causal attention": layers.causal_attention,
    "separable": layers.separable,
    "scatters": programs.scatters,
    "casts": programs.casts,
    "cached keys": programs.cached_keys,
    "draws": programs.draws,
    "averaged": programs.averaged,
}


@cache
def model_of(name: str) -> DrawnModel:
    return MODELS[name]()


@cache
def expected_of(name: str, replicas: int, workers: int | None = None) -> Trained:
    return model_of(name).expected(replicas, workers)


def assert_as_expected(found: Trained, expected: Trained, rtol: float = 1e-9) -> None:
    """Each place of a mesh has the variables and the outputs of its replica; one device has those of all."""
    places = len(found.outputs[0])
    for place in range(places):
        mine = [[outputs[place]] for outputs in found.outputs]
        wanted = [[outputs[place * len(outputs) // places]] for outputs in expected.outputs]
        assert_same(replace(found, outputs=mine), replace(expected, outputs=wanted), rtol)


CONSTRAINED = {"inputs": (4, 8), "heads": (4, 2, 4), "weights": (2, 4, 4), "attended": (4, 8), "hidden": (4, 16)}
"""The lengths of the tensors of `constrained`, without that of the batch."""


def constrained(layouts: Mapping[str, Layout], is_weighed: bool) -> DrawnModel:
    """A block of attention that constrains some of its tensors; `is_weighed` adds a reader of the hidden ones."""
    qkv, out, up, down = (
        variable("qkv", 8, 3, 2, 4),
        variable("out", 2, 4, 8),
        variable("up", 8, 16),
        variable("down", 16, 8),
    )

    def see(name: str, x: tf.Tensor) -> tf.Tensor:
        return constrain(x, layouts[name]) if name in layouts else x

    def loss(x: tf.Tensor) -> tf.Tensor:
        x = see("inputs", x)
        query, key, value = tf.unstack(tf.einsum("ntd,dkhe->knthe", _normalized(x), qkv))
        weights = see("weights", tf.nn.softmax(tf.einsum("nthe,nshe->nhts", see("heads", query), key)))
        made = tf.einsum("nhts,nshe->nthe", weights, value)
        x = see("attended", x + tf.einsum("nthe,hed->ntd", made, out))
        hidden = see("hidden", tf.nn.gelu(_normalized(x) @ up))
        found = tf.reduce_mean(tf.reduce_sum(tf.square(x + hidden @ down), [1, 2]))
        return found + tf.reduce_mean(tf.reduce_max(hidden, [1, 2])) if is_weighed else found

    return made(trained(loss, [qkv, out, up, down]), inputs(4, 8))


def _normalized(x: tf.Tensor) -> tf.Tensor:
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 0.1)
