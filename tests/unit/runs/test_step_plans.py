"""StepPlans: if a kernel rejects a strategy, the error names its position in the file."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import StrategyError
from autodist.graph.renaming import Renaming
from autodist.resources import ResourceSpec
from autodist.runs.step_plans import StepPlans
from autodist.strategies import Parallax, PSLoadBalancing, arranged, builder_from_section
from tests.unit.kernels.in_one_process import capture
from tests.unit.kernels.whole_sum_steps import gathered

STAGES = """
nodes: [{address: localhost, cpus: [0, 1], workers: 2}]
strategy:
  builder: Pipeline
  micro_batches: 2
  schedule: 1F1B
  stages:
    - [a, c]
    - [b]
"""


def goes_back(x, a, b, c):
    return tf.reduce_mean(tf.tanh(x @ a) @ b @ c)


def gathers(x, a, b, c):
    return tf.reduce_mean(tf.math.reduce_std(gathered(tf.tanh(x @ a @ c) @ b)))


def weighs_by_all(x, a, b, c):
    rows = tf.tanh(x @ a @ c) @ b
    used = tf.cast(tf.stop_gradient(rows) > 0.0, tf.float64)
    return tf.reduce_sum(rows * used) / tf.reduce_sum(used)


@pytest.mark.parametrize(
    ("loss_of", "line", "told"),
    [
        (goes_back, 7, "c is in pipeline stage 0, but its reader"),
        (gathers, 4, "reduces or gathers over all examples"),
        (weighs_by_all, 6, "micro-batches wait for each other"),
    ],
)
def test_steps_that_a_pipeline_cannot_run_are_refused_with_the_line_of_the_option(tmp_path, loss_of, line, told):
    variables = [tf.Variable(np.eye(3), name=name) for name in "abc"]

    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(x, *variables)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(gradient)
        return loss

    path = tmp_path / "cluster.yml"
    path.write_text(STAGES)
    spec = ResourceSpec.from_file(path)
    builder = builder_from_section(spec.strategy)
    plans = StepPlans(arranged(builder, spec), builder, 0, None)
    item = capture(step, np.ones((2, 3)), is_global=True).step
    names = {v.name: v.name for v in item.variables}
    strategy = plans.build(item, names)
    with pytest.raises(StrategyError, match=told) as caught:
        plans.rehearse(item, strategy, names)
    assert (caught.value.place.file, caught.value.place.line) == (str(path), line)
    assert any("in the kernel" in note for note in caught.value.__notes__)


def looking_up(tables, read=()):
    def train(ids):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_mean(tf.gather(table, ids)) for table in [*tables, *read]])
        for table, gradient in zip(tables, tape.gradient(loss, tables), strict=True):
            table.scatter_sub(gradient)
        return loss

    return train


def tables_of(builder, sizes, reads_earlier=False):
    """The owner of each table of two steps, which are planned one after the other.

    Args:
        builder: decides.
        sizes: of the tables that each step trains.
        reads_earlier: whether a step reads the tables that the steps before it train, too.
    """
    spec = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1, 2], "workers": 3}]})
    plans = StepPlans(spec, builder, 0, None)
    owners, earlier = [], []
    for step in sizes:
        tables = {name: tf.Variable(np.ones((rows, 2)), name=name) for name, rows in step.items()}

        read = earlier if reads_earlier else ()
        item = capture(looking_up(list(tables.values()), read), np.zeros(3, np.int64)).step
        earlier += tables.values()
        names = {v.name: v.name for v in item.variables}
        strategy = plans.build(item, names)
        plans.decide(strategy, names, Renaming())
        owners.append({node.variable: node.parameter_server.owner for node in strategy.nodes})
    return owners


@pytest.mark.parametrize("builder", [PSLoadBalancing(), Parallax()])
def test_a_later_step_is_planned_with_what_earlier_steps_have_placed(builder):
    first, second, third = tables_of(builder, [{"a": 90, "b": 40}, {"c": 50}, {"d": 20}])
    assert (first, second, third) == ({"a": 0, "b": 1}, {"c": 2}, {"d": 1})


def test_variables_that_a_later_step_only_reads_count_as_load():
    steps = [{"a": 90, "b": 40}, {"c": 50}, {"d": 20}]
    assert tables_of(PSLoadBalancing(), steps, reads_earlier=True) == [{"a": 0, "b": 1}, {"c": 2}, {"d": 1}]


def test_variables_placed_by_an_earlier_step_stay_and_count_once():
    first, second, third = tables_of(PSLoadBalancing(), [{"a": 90, "b": 40}, {"b": 40, "c": 20}, {"d": 30}])
    assert first == {"a": 0, "b": 1}
    assert second == {"b": 1, "c": 2}
    assert third == {"d": 2}
