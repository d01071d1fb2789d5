import pathlib

import pytest

import autodist.strategies
from autodist.resources import ResourceSpec
from autodist.strategies import (
    PS,
    AllReduce,
    OverrideVariables,
    Parallax,
    PSLoadBalancing,
    builder_from_section,
    check_strategy,
    registered_names,
)

PRESETS = sorted((pathlib.Path(autodist.strategies.__file__).parent / "presets").glob("*.yml"))
NODES = "nodes:\n  - {address: localhost, cpus: [0, 1], workers: 2}\n"


def test_every_builder_has_a_preset():
    assert {path.stem for path in PRESETS} == {*registered_names(), "OverrideVariables"}


@pytest.mark.parametrize(
    ("name", "builder"),
    [("AllReduce", AllReduce()), ("PS", PS()), ("PSLoadBalancing", PSLoadBalancing()), ("Parallax", Parallax())],
)
def test_a_preset_shows_the_defaults(tmp_path, name, builder):
    assert read(name, tmp_path)[1] == builder


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_beside_nodes_makes_a_strategy_that_passes(path, step, tmp_path):
    spec, builder = read(path.stem, tmp_path)
    planned = step({"embedding": (10, 2), "dense/bias": (2,), "head/kernel": (2, 2)}, sparse=["embedding"])
    strategy = builder.build(planned, spec)
    check_strategy(strategy, planned, spec)
    assert len(strategy.nodes) == 3


def test_the_preset_of_overrides_overrides(tmp_path):
    _, builder = read("OverrideVariables", tmp_path)
    assert isinstance(builder, OverrideVariables)
    assert len(builder.overrides) == 3


def read(name, folder):
    """Reads a preset as a user does who copies it below the nodes."""
    (preset,) = (path for path in PRESETS if path.stem == name)
    path = folder / "cluster.yml"
    path.write_text(NODES + preset.read_text())
    spec = ResourceSpec.from_file(path)
    return spec, builder_from_section(spec.strategy)
