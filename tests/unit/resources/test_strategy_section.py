"""The strategy section keeps the user's keys, in order, with their positions in the file."""

from __future__ import annotations

import pathlib

import pytest

from autodist.errors import Place
from autodist.resources import ResourceSpec, StrategySection

TEXT = """\
nodes: [{address: localhost}]
strategy:
  builder: my_package.MyBuilder
  chunk_size: 64
  nested: {a: [1, 2]}
  variables:
    "embedding/.*":
      synchronizer: PS
      partition: {axis: 0}
    dense: {synchronizer: AllReduce}
"""


@pytest.fixture
def section(tmp_path: pathlib.Path) -> StrategySection:
    path = tmp_path / "cluster.yml"
    path.write_text(TEXT)
    strategy = ResourceSpec.from_file(path).strategy
    assert strategy is not None
    return strategy


def test_options_are_every_other_key(section: StrategySection) -> None:
    assert section.builder == "my_package.MyBuilder"
    assert section.options == {"chunk_size": 64, "nested": {"a": [1, 2]}}


def test_overrides_are_in_the_order_of_the_file(section: StrategySection) -> None:
    assert [(override.pattern, override.settings) for override in section.variables] == [
        ("embedding/.*", {"synchronizer": "PS", "partition": {"axis": 0}}),
        ("dense", {"synchronizer": "AllReduce"}),
    ]
    places = [override.place for override in section.variables]
    assert [place.line for place in places if place] == [7, 10]


@pytest.mark.parametrize(
    "path, line, key",
    [
        ((), 2, "strategy"),
        (("chunk_size",), 4, "strategy.chunk_size"),
        (("nested", "a", 1), 5, "strategy.nested.a[1]"),
        (("variables", "embedding/.*", "partition", "axis"), 9, 'strategy.variables["embedding/.*"].partition.axis'),
        (("variables", "dense", "staleness"), 10, "strategy.variables.dense.staleness"),  # its parent
        (("absent",), 2, "strategy.absent"),
    ],
)
def test_place_of_any_key(section: StrategySection, path: tuple[str, ...], line: int, key: str) -> None:
    assert section.source.file is not None
    assert section.place(*path) == Place(section.source.file, line, key)


def test_there_are_no_places_without_a_file() -> None:
    spec = ResourceSpec.from_dict(
        {"nodes": [{"address": "a"}], "strategy": {"builder": "PS", "variables": {"x": {"synchronizer": "PS"}}}}
    )
    assert spec.strategy is not None
    assert spec.strategy.place("builder") is None
    assert spec.strategy.variables[0].place is None


@pytest.mark.parametrize("written", ["AllReduce", {}, {"compressor": "FLOAT16"}, {"variables": {"a": {"x": 1}}}])
def test_a_section_with_a_builder_alone_or_none_is_written_as_read(written: str | dict[str, object]) -> None:
    spec = ResourceSpec.from_dict({"nodes": [{"address": "a"}], "strategy": written})
    assert spec.strategy is not None
    assert spec.strategy.builder == ("AllReduce" if written == "AllReduce" else None)
    assert spec.to_dict()["strategy"] == ({"builder": "AllReduce"} if written == "AllReduce" else written)
    assert ResourceSpec.from_payload(spec.to_payload()) == spec
