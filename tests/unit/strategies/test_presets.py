import dataclasses
import pathlib

import pytest

import autodist.strategies
from autodist.resources import ResourceSpec
from autodist.strategies import (
    OverrideVariables,
    builder_from_section,
    check_strategy,
    find_builder,
    registered_names,
)
from autodist.strategies.reader import ON_MESH

PRESETS = sorted((pathlib.Path(autodist.strategies.__file__).parent / "presets").glob("*.yml"))
NODES = "nodes:\n  - {address: localhost, cpus: [0, 1], workers: 2}\n"


def test_every_builder_has_a_preset():
    assert {path.stem for path in PRESETS} == {*registered_names(), "OverrideVariables"}


@pytest.mark.parametrize("name", registered_names())
def test_a_preset_shows_every_option_with_its_default(tmp_path, name):
    spec, placed = read(name, tmp_path)
    assert placed.builder == find_builder(name)()
    left_out = {option.name for option in dataclasses.fields(placed.builder)} - spec.strategy.options.keys()
    by_pattern = set(ON_MESH.values())
    assert left_out <= {"max_shards", "local_proxy_variable", "save_as", "tensors", *by_pattern}
    shown = {"variables" if option in by_pattern else option for option in left_out}  # their key in YAML
    assert all(f"  # {option}:" in preset_of(name).read_text() for option in shown)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_beside_nodes_makes_a_strategy_that_passes(path, step, tmp_path):
    spec, builder = read(path.stem, tmp_path)
    planned = step({"embedding": (10, 2), "dense/bias": (2,), "head/kernel": (2, 2)}, sparse=["embedding"])
    strategy = builder.build(planned, spec)
    check_strategy(strategy, planned, spec)
    assert len(strategy.nodes) == 3


def test_the_preset_of_overrides_overrides(tmp_path):
    _, placed = read("OverrideVariables", tmp_path)
    assert isinstance(placed.builder, OverrideVariables)
    assert len(placed.builder.overrides) == 3


def read(name, folder):
    """Reads a preset like a user who copies it below the nodes."""
    path = folder / "cluster.yml"
    path.write_text(NODES + preset_of(name).read_text())
    spec = ResourceSpec.from_file(path)
    return spec, builder_from_section(spec.strategy)


def preset_of(name):
    (preset,) = (path for path in PRESETS if path.stem == name)
    return preset
