"""The option `recompute`, which all builders have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import StrategyError
from autodist.resources import ResourceSpec
from autodist.runs.measuring.auto_measurements import known_measurements
from autodist.strategies import (
    AllReduce,
    Auto,
    Override,
    OverrideVariables,
    UseAllReduce,
    builder_from_section,
    call_builder,
    find_builder,
    registered_names,
)
from autodist.strategies.strategy_file import strategy_yaml
from tests.unit.kernels.in_one_process import capture

NODES = "nodes: [{address: localhost, cpus: [0, 1], workers: 2}]\n"


@pytest.fixture(scope="module")
def layers():
    """A captured step of three equal name scopes."""
    weights = [tf.Variable(np.eye(4), name=f"weight_{k}") for k in range(3)]

    def step(x):
        with tf.GradientTape() as tape:
            for k, weight in enumerate(weights):
                with tf.name_scope(f"part_{k}"):
                    x = tf.tanh(tf.sigmoid(x @ weight))
            loss = tf.reduce_mean(x)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(gradient)
        return loss

    return capture(step, np.ones((2, 4))).step


def read(folder, options):
    path = folder / "cluster.yml"
    path.write_text(f"{NODES}strategy:\n  {options}\n")
    return ResourceSpec.from_file(path)


def blocks(strategy):
    return {block.name: list(block.scopes) for block in strategy.recomputed_blocks}


@pytest.mark.parametrize("name", registered_names())
def test_a_file_selects_blocks_for_every_builder(layers, tmp_path, name):
    spec = read(tmp_path, f"builder: {name}\n  recompute: ['part_[12]']")
    strategy = builder_from_section(spec.strategy).build(layers, spec)
    assert blocks(strategy) == {"part_1": ["part_1"], "part_2": ["part_2"]}


@pytest.mark.parametrize("name", registered_names())
def test_without_the_option_there_are_no_blocks(layers, tmp_path, name):
    spec = read(tmp_path, f"builder: {name}")
    assert not builder_from_section(spec.strategy).build(layers, spec).recomputed_blocks
    assert find_builder(name)().recompute is False


def test_a_pipeline_that_recomputes_all_layers_needs_no_blocks(layers, tmp_path):
    spec = read(tmp_path, "builder: Pipeline\n  recompute: true")
    strategy = builder_from_section(spec.strategy).build(layers, spec)
    assert strategy.pipeline.recompute
    assert not strategy.recomputed_blocks


def test_a_script_selects_blocks(layers, tmp_path):
    spec = read(tmp_path, "builder: PS")
    every = {f"part_{k}": [f"part_{k}"] for k in range(3)}
    assert blocks(call_builder(AllReduce(recompute=True), layers, spec)) == every
    assert blocks(call_builder(AllReduce(recompute=["part_0"]), layers, spec)) == {"part_0": ["part_0"]}
    overridden = OverrideVariables(AllReduce(recompute=True), (Override("weight_0", UseAllReduce(group=3)),))
    assert blocks(call_builder(overridden, layers, spec)) == every


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("['part_9']", "the pattern 'part_9' matches no layer of this step .* The nearest layers are part_2, part_1"),
        ("['[']", "is no regular expression"),
        ("some", "recompute is 'some', which is not allowed"),
        ("[]", "recompute is .*, which is not allowed"),
        ("[1]", "recompute is .*, which is not allowed"),
    ],
)
def test_a_value_without_effect_is_refused_with_its_place(layers, tmp_path, value, message):
    spec = read(tmp_path, f"builder: AllReduce\n  recompute: {value}")
    with pytest.raises(StrategyError, match=message) as caught:
        builder_from_section(spec.strategy).build(layers, spec)
    assert caught.value.place.line == 4


def test_auto_recomputes_if_nothing_else_fits_and_its_file_and_later_runs_do_the_same(layers, tmp_path):
    spec, rows = read(tmp_path, "builder: Auto"), 1000
    found = known_measurements(layers, spec, {name: [rows, 4] for name in layers.inputs})
    own = 8 * rows * 4  # of a float64 tensor
    assert found.activations == pytest.approx(6 * own, rel=1e-3)
    assert found.recomputation.saved == 2 * own  # of three blocks with a tensor each between their layers
    assert 0.3 < found.recomputation.again < 0.4
    spec = spec.with_measurements(replace(found, memory=(5 * own,) * 2))
    strategy = call_builder(Auto(), layers, spec)
    assert len(strategy.recomputed_blocks) == 3
    assert strategy.choice.alternatives[0].name.endswith("recomputed")
    (tmp_path / "cluster.yml").write_text(NODES + strategy_yaml(strategy))
    saved = ResourceSpec.from_file(tmp_path / "cluster.yml")
    assert blocks(builder_from_section(saved.strategy).build(layers, saved)) == blocks(strategy)
    kept = replace(found, chosen=strategy.SerializeToString(deterministic=True))
    assert call_builder(Auto(), layers, spec.with_measurements(kept)).recomputed_blocks == strategy.recomputed_blocks
