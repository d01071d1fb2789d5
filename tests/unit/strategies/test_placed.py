"""Impossible requests of a file are reported with file, line and key, before anything starts."""

import pytest

from autodist.errors import Place, StrategyError
from autodist.resources import ResourceSpec
from autodist.strategies import AllReduce, PlacedBuilder, builder_from_section

NODES = "nodes: [{address: localhost, cpus: [0, 1], workers: 2}]\n"


@pytest.fixture
def build(tmp_path, language_model):
    """Builds the strategy of a YAML whose strategy section begins on line 2."""

    def build_section(section):
        path = tmp_path / "cluster.yml"
        path.write_text(NODES + section)
        spec = ResourceSpec.from_file(path)
        return builder_from_section(spec.strategy).build(language_model, spec)

    return build_section


def test_placements_that_fit_are_those_of_the_builder(build, language_model):
    machines = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]})
    assert build("strategy: {builder: AllReduce}\n") == AllReduce().build(language_model, machines)


def test_a_section_from_python_has_no_place_and_needs_no_wrapper():
    spec = ResourceSpec.from_dict({"nodes": [{"address": "localhost"}], "strategy": {"builder": "AllReduce"}})
    assert not isinstance(builder_from_section(spec.strategy), PlacedBuilder)


PATTERN = 'strategy.variables["dense/.*"]'


@pytest.mark.parametrize(
    ("section", "line", "key", "said"),
    [
        ("builder: PS\n  owner: 9", 4, "strategy.owner",
         "owner is 9, but .*the workers are 0 .localhost:0., 1 .localhost:1."),
        ("builder: Parallax\n  all_reduce_spec: RING", 4, "strategy.all_reduce_spec",
         "dense/kernel is reduced by RING and embedding by PS: .*Use all_reduce_spec SHUFFLE instead of RING"),
        ("builder: AllReduce\n  compressor: FLOAT16", 4, "strategy.compressor",
         "embedding has the compressor FLOAT16, but its gradient is sparse"),
        ("builder: AllReduce\n  all_reduce_spec: NCCL", 4, "strategy.all_reduce_spec", "NCCL, which needs a GPU"),
        ("builder: AllReduce\n  variables:\n    dense/.*:\n      synchronizer: PS\n      owner: worker9", 5, PATTERN,
         "owner is 'worker9', but there is no such worker; the workers are 0"),
        ("builder: PS\n  variables:\n    dense/.*:\n      synchronizer: AllReduce\n      all_reduce_spec: RING",
         7, f"{PATTERN}.all_reduce_spec", "dense/kernel is reduced by RING and embedding by PS"),
        ("builder: PS\n  variables:\n    dense/b.*:\n      synchronizer: PS\n      partition: {axis: 1, sizes: [1]}",
         5, 'strategy.variables["dense/b.*"]',
         "dense/bias cannot be .*: axis 1 is out of range of its shape 100; use axis 0"),
        ("builder: AllReduce\n  variables:\n    dense/k.*:\n      synchronizer: PS\n      partition: {shards: 9}",
         5, 'strategy.variables["dense/k.*"]', "dense/kernel cannot be partitioned: 9 shards are more than the 8 ind"),
        ("builder: AllReduce\n  variables:\n    dense/k.*: {synchronizer: AllReduce, partition: {sizes: [7, 2]}}",
         5, 'strategy.variables["dense/k.*"]', "the sizes .7, 2. sum to 9, but its axis 0 has 8 indices"),
        ("builder: AllReduce\n  variables:\n    embedding:\n      synchronizer: AllReduce\n      compressor: TOP_K",
         7, "strategy.variables.embedding.compressor", "embedding has the compressor TOP_K 1 % .*sparse"),
        ("builder: AllReduce\n  variables:\n    nothing:\n      synchronizer: PS", 5, "strategy.variables.nothing",
         "The pattern 'nothing' matches no variable"),
        ("builder: builders_beside.Careless", 2, "strategy", "Careless has no node for embedding"),
    ],
)  # fmt: skip
def test_a_fault_has_the_place_of_what_asked_for_it(build, tmp_path, monkeypatch, section, line, key, said):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "builders_beside.py").write_text(CARELESS)
    with pytest.raises(StrategyError, match=said) as caught:
        build(f"strategy:\n  {section}\n")
    assert caught.value.place == Place(str(tmp_path / "cluster.yml"), line, key)
    assert str(caught.value).startswith(f"{tmp_path}/cluster.yml:{line}: {key}: ")


CARELESS = """
from autodist.strategies import StrategyBuilder, make_strategy

class Careless(StrategyBuilder):
    def build(self, graph_item, resource_spec):
        return make_strategy("Careless", resource_spec, [], [])
"""
