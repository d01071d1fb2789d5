"""Errors in a user's builder are reported as its own, with its name and the position."""

from __future__ import annotations

import dataclasses
import types

import pytest
import tensorflow as tf

from autodist import AutoDist
from autodist.errors import CaptureError, ResourceSpecError, StrategyError
from autodist.resources import ResourceSpec
from autodist.strategies import PS, OverrideVariables, builder_from_section, call_builder

NODES = "nodes: [{address: localhost}]\n"


class Builder:
    """A user's builder that runs a given function."""

    def __init__(self, act):
        self.act = act

    def build(self, graph_item, resource_spec):
        return self.act(graph_item, resource_spec)


def asked(act, language_model, cluster):
    with pytest.raises(StrategyError) as caught:
        call_builder(Builder(act), language_model, cluster())
    return caught.value


def test_the_built_strategy_is_returned(language_model, cluster):
    assert call_builder(Builder(PS().build), language_model, cluster()) == PS().build(language_model, cluster())


def test_an_exception_names_builder_place_and_cause(language_model, cluster):
    error = asked(lambda item, spec: {}["owner"], language_model, cluster)
    assert str(error).startswith("The builder Builder failed: KeyError: 'owner' (")
    assert "test_build_strategy.py:" in str(error)
    assert isinstance(error.__cause__, KeyError)


def test_errors_of_our_own_stay_what_they_are(language_model, cluster):
    def refuse(step, spec):
        raise CaptureError("no")

    with pytest.raises(CaptureError, match="^no$"):
        call_builder(Builder(refuse), language_model, cluster())


@pytest.mark.parametrize(
    "returned, kind", [(None, "None"), ({}, "a dict"), (b"", "a bytes"), (tf.constant(1), "a EagerTensor")]
)
def test_an_object_that_is_no_strategy_is_refused(returned, kind, language_model, cluster):
    error = asked(lambda item, spec: returned, language_model, cluster)
    assert str(error).startswith(f"The builder Builder returned {kind} from build (")
    assert "make_strategy" in str(error)


def test_a_builder_that_changes_the_step_is_refused(cluster):
    graph = types.SimpleNamespace(graph_def=tf.compat.v1.GraphDef(), variables=(), gradients=())
    error = asked(lambda step, spec: step.graph_def.node.add(), graph, cluster)
    assert "returned a NodeDef" in str(error)

    def change(step, spec):
        step.graph_def.node.add(name="mine")
        return PS().build(step, spec)

    error = asked(change, graph, cluster)
    assert str(error).startswith("The builder Builder changed the graph of the step in build (")


def test_a_builder_behind_patterns_is_named(language_model, cluster):
    with pytest.raises(StrategyError, match="The builder Builder returned None"):
        OverrideVariables(Builder(lambda item, spec: None), ()).build(language_model, cluster())


@pytest.fixture
def section(tmp_path, monkeypatch):
    """Builds the strategy of a YAML whose builder is in a module of this text."""

    def read(module, options=""):
        monkeypatch.syspath_prepend(tmp_path)
        name = f"own_builders_{abs(hash(module))}"
        (tmp_path / f"{name}.py").write_text(module)
        path = tmp_path / "cluster.yml"
        path.write_text(NODES + f"strategy:\n  builder: {name}.Mine\n{options}")
        return ResourceSpec.from_file(path)

    return read


@pytest.mark.parametrize(
    "module, line, said",
    [
        ("class Mine:\n    def build(self, i, s): pass\n", 2, "strategy: The builder Mine returned None from build"),
        ("class Mine:\n    def build(self, i, s): 1 / 0\n", 2, "strategy: The builder Mine failed: ZeroDivisionError"),
        ("class Mine:\n    def build(self): pass\n", 2, "strategy: The builder Mine failed: TypeError: "),
        (
            "class Mine:\n    def __init__(self): 1 / 0\n    def build(self, i, s): pass\n",
            2,
            r"Mine cannot be made: ZeroDivisionError: division by zero \(.*\.py:2\)",
        ),
        (
            "class Mine:\n    __signature__ = 5\n    def build(self, i, s): pass\n",
            2,
            "strategy: The options of own_builders_.*Mine cannot be determined: TypeError: ",
        ),
        ("1 / 0\n", 3, r"strategy.builder: The builder's module .* cannot be imported: ZeroDivisionError: .*\.py:1\)"),
        ("class\n", 3, r"strategy.builder: The builder's module .* cannot be imported: SyntaxError: .*line 1\)"),
    ],
)
def test_a_faulty_module_is_reported_with_its_place_in_the_file(section, language_model, module, line, said):
    spec = section(module)
    with pytest.raises(StrategyError, match=said) as caught:
        builder_from_section(spec.strategy).build(language_model, spec)
    assert caught.value.place is not None and caught.value.place.line == line


@pytest.mark.parametrize(
    "given, said",
    [
        (PS, r"strategy is the class PS; pass an instance, PS\(\)"),
        (1, "strategy is 1, of type int; pass an object that has build.*or a builder's name, such as 'PS'"),
        ("Parallex", "There is no builder named Parallex. Did you mean Parallax"),
        ({"builder": "PS", "ower": 1}, "PS has no option ower. Did you mean owner"),
        ({"chunk_size": 0}, r"AllReduce \(the default builder\): chunk_size is 0, which is not allowed"),
        (dataclasses, "strategy is <module 'dataclasses'"),
    ],
)
def test_an_object_that_is_no_builder_is_refused_at_once(given, said):
    with pytest.raises(StrategyError, match=said):
        AutoDist(strategy=given)


def test_the_older_name_of_the_strategy_is_known_and_both_are_refused():
    with pytest.raises(StrategyError, match="There is no builder named Parallex"):
        AutoDist(strategy_builder="Parallex")
    with pytest.raises(ValueError, match="pass either strategy or its older name strategy_builder, not both"):
        AutoDist(strategy="PS", strategy_builder="PS")


@pytest.mark.parametrize(
    "given, said",
    [
        ({"resource_spec": "cluster.yml"}, "resource_spec is a str; give a ResourceSpec"),
        (
            {"resource_spec_file": {"nodes": []}},
            "resource_spec_file is a dict; give the path of a YAML file, or resource",
        ),
    ],
)
def test_an_object_that_is_no_spec_is_refused_at_once(given, said):
    with pytest.raises(ResourceSpecError, match=said):
        AutoDist(**given)


def test_a_builder_that_fails_is_told_where_a_step_is_first_run():
    ad = AutoDist(strategy=Builder(lambda item, spec: None))
    with ad.scope():
        weight = tf.Variable(1.0)

        @ad.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(weight * x)
            weight.assign_sub(tape.gradient(loss, weight))

        with pytest.raises(StrategyError, match="The builder Builder returned None"):
            step(tf.ones([2]))
