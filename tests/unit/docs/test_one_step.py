"""docs/one-step.md: its listings after each kernel equal the output of the page's program."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import keras
import pytest
from typer.testing import CliRunner

from autodist.cli.app import app
from autodist.kernels.pipeline import DUMP_VARIABLE
from tests.unit.docs.pages import blocks_of

PAGE = "one-step.md"


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the chief, after the page's command."""
    folder = tmp_path_factory.mktemp("one_step")
    ((_, script),) = blocks_of(PAGE, "python")
    (folder / "small.py").write_text(script)
    keras.utils.clear_session(free_memory=False)  # names are counted from the first on, as in a process of its own
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv(DUMP_VARIABLE, "dump")
        done = CliRunner().invoke(app, ["plan", "--workers", "2", "small.py"])
    assert done.exit_code == 0, done.output
    yield folder / "dump" / "plan" / "worker_0"
    keras.utils.clear_session(free_memory=False)


SHOWN = [(re.fullmatch(r'title="(.+)"', title)[1], text) for title, text in blocks_of(PAGE, "text")]  # type: ignore[index]


@pytest.mark.parametrize(
    ("file", "text"), SHOWN, ids=[f"{k}-{file.split('/')[0]}" for k, (file, _) in enumerate(SHOWN)]
)
def test_what_is_shown_is_written(file: str, text: str, dump: Path) -> None:
    kernel, name = file.split("/")
    ((written),) = dump.glob(f"*_{kernel}/{name}")
    lines = (line.strip() for line in written.read_text().splitlines())
    for shown in text.splitlines():
        pattern = re.compile(".*".join(map(re.escape, shown.strip().split("…"))))
        if shown.strip() != "…":
            assert any(pattern.fullmatch(line) for line in lines), shown


def test_all_phases_are_shown() -> None:
    assert len(SHOWN) == 9
