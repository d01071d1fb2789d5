"""Scripts of AutoDist 2021 use that version's names of compressors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autodist.compressors import Compressor, Float16, Uncompressed, older_names
from autodist.errors import StrategyError
from autodist.resources import StrategySection
from autodist.strategies import AllReduce, Parallax, PartitionedAR, builder_from_section


@pytest.fixture(autouse=True)
def untold() -> Iterator[None]:
    older_names._warn.cache_clear()
    yield
    older_names._warn.cache_clear()


def in_python(compressor: Any, tmp_path: Path) -> Any:
    return AllReduce(chunk_size=64, compressor=compressor)


def in_a_mapping(compressor: Any, tmp_path: Path) -> Any:
    given = {"builder": "AllReduce", "chunk_size": 64, "compressor": compressor}
    return builder_from_section(StrategySection.from_script(given))


def in_a_file(compressor: Any, tmp_path: Path) -> Any:
    file = tmp_path / "strategy.yml"
    file.write_text(f"strategy: {{builder: AllReduce, chunk_size: 64, compressor: {compressor}}}")
    section = StrategySection.from_file(str(file))
    assert section is not None
    return builder_from_section(section).builder  # type: ignore[attr-defined]


@pytest.mark.parametrize("made", [in_python, in_a_mapping, in_a_file])
@pytest.mark.parametrize(
    "name, meant",
    [
        ("NoneCompressor", Uncompressed()),
        ("HorovodCompressor", Float16()),
        ("HorovodCompressorEF", Float16(error_feedback=True)),
    ],
)
def test_a_name_of_2021_means_the_compressor_of_today_and_is_called_deprecated_once(
    name: str,
    meant: Compressor,
    made: Callable[[Any, Path], Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        assert made(name, tmp_path) == AllReduce(chunk_size=64, compressor=meant)
    (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert name in said and "deprecated; write `compressor: " in said


def test_the_suggested_replacement_means_the_same(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    meant = AllReduce(chunk_size=64, compressor="HorovodCompressorEF")
    written = caplog.records[0].getMessage().partition("write `compressor: ")[2].removesuffix("`.")
    assert in_a_file(written, tmp_path) == meant


@pytest.mark.parametrize("builder", [PartitionedAR, Parallax])
def test_every_builder_with_a_compressor_takes_it_with_options_of_its_own(builder: Any) -> None:
    given = {"kind": "HorovodCompressor", "error_feedback": True}
    assert builder(compressor=given) == builder(compressor=Float16(error_feedback=True))


def test_other_names_are_refused() -> None:
    with pytest.raises(StrategyError, match="There is no compressor named HorovodCompressors"):
        AllReduce(compressor="HorovodCompressors")  # type: ignore[arg-type]
