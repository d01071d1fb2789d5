"""docs/recipes.md: AutoDist plans each recipe's script on the recipe's machines, under its strategy."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import keras
import pytest
import yaml
from typer.testing import CliRunner

from autodist.cli.app import app
from tests.unit.docs.pages import BLOCK, PAGES, ROOT

TITLE = re.compile(r' title="(.+)"')


def _sections() -> dict[str, dict[str, str]]:
    """The titled files of each section; the beginning of the page has the name ""."""
    parts = re.split(r"^## (.+)\n", PAGES["recipes.md"], flags=re.MULTILINE)
    return {
        name: {
            titled[1]: block["text"]
            for block in BLOCK.finditer(text)
            if (titled := TITLE.fullmatch(block["more"] or ""))
        }
        for name, text in zip(["", *parts[1::2]], parts[::2], strict=True)
    }


SECTIONS = _sections()
PLANNED = [name for name, files in SECTIONS.items() if "cluster.yml" in files]


def test_most_recipes_are_planned() -> None:
    assert len(PLANNED) >= 10
    assert all("cluster.yml" in files for name, files in SECTIONS.items() if name and "train.py" in files)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANNED)
def test_a_recipe_is_planned(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"train.py": SECTIONS[""]["train.py"]} | SECTIONS[name]
    machines = yaml.safe_load(files["cluster.yml"])
    if "keras_hub" in files["train.py"]:
        pytest.importorskip("keras_hub")
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    monkeypatch.chdir(tmp_path)
    keras.utils.clear_session(free_memory=False)
    done = CliRunner().invoke(app, ["plan", "--cluster", "cluster.yml", "train.py"])
    keras.utils.clear_session(free_memory=False)
    assert done.exit_code == 0, done.output
    strategy = machines.get("strategy", "AllReduce")
    assert (strategy if isinstance(strategy, str) else strategy["builder"]) in done.output
    assert all(node["address"] in done.output for node in machines["nodes"])


@pytest.mark.parametrize("file", ["slurm.sbatch", "jobset.yaml"])
def test_a_scheduler_has_the_file_of_the_examples(file: str) -> None:
    (found,) = [files[file] for files in SECTIONS.values() if file in files]
    assert found == f'--8<-- "examples/{file}"\n'
    text = (ROOT / "examples" / file).read_text()
    if file.endswith(".sbatch"):
        done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, timeout=30, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert len(list(yaml.safe_load_all(text))) == 2


def test_ray_has_the_program_that_the_engines_run() -> None:
    assert '\n--8<-- "docs/engines.md:ray"\n' in PAGES["recipes.md"]
    [included] = re.findall(r"\[start:ray\] -->\n(.*?)<!-- --8<-- \[end:ray\]", PAGES["engines.md"], re.DOTALL)
    [block] = BLOCK.finditer(included)
    assert TITLE.fullmatch(block["more"] or "")
    compile(block["text"], "ray_training.py", "exec")
