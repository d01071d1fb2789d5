"""README.md and docs/: their code runs, and their quotations equal the package's output."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
import runpy
import shlex
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import typer
import yaml

import autodist
from autodist import AutoDist, ResourceSpec, errors
from autodist.cli.app import app
from tests.unit.docs.pages import PAGES, ROOT, blocks_of, is_included, is_patch

HERE = {"nodes": [{"address": "localhost", "cpus": [0, 1]}]}


def blocks(kind: str) -> list[Any]:
    """The blocks of a kind of all pages, as parameters of a test."""
    return [
        pytest.param(page, text, id=f"{page}-{number}")
        for page in PAGES
        for number, (_, text) in enumerate(blocks_of(page, kind))
        if not (is_patch(text) or is_included(text))
    ]


def _with_a_model() -> dict[str, Any]:
    """Returns the names that a script has before training: data, a model in the scope, an optimizer, a loss."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((64, 64), dtype=np.float32), rng.standard_normal((64, 1), dtype=np.float32)
    ad = AutoDist("cluster.yml")
    with ad.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.01)
        optimizer.build(model.trainable_variables)

    @ad.function
    def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - model(x)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return {
        "keras": keras,
        "np": np,
        "tf": tf,
        "x": x,
        "y": y,
        "ad": ad,
        "model": model,
        "optimizer": optimizer,
        "batch": lambda step=0: (x[:8], y[:8]),
        "loss_of": lambda labels, outputs: tf.reduce_mean(tf.square(labels - outputs)),
        "train_step": train_step,
        "range": lambda *ends: range(*ends)[:200],  # steps of the long loops that are to be seen
    }


def _launch(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    inspect.signature(LAUNCH).bind(function, *arguments, **options)
    return function(AutoDist("cluster.yml"), *arguments)


LAUNCH = autodist.launch


@pytest.mark.slow
@pytest.mark.parametrize(("page", "text"), blocks("python"))
def test_python_runs(page: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(autodist, "launch", _launch, raising=False)
    monkeypatch.setattr("autodist.kernels.registry._registered_rules", {})
    (tmp_path / "cluster.yml").write_text(json.dumps(HERE))
    names = _with_a_model()
    if "placeholder" in text:
        names["batch"] = names["x"]
    script = tmp_path / f"{page}.py"
    script.write_text(text)
    runpy.run_path(str(script), names)


@pytest.mark.parametrize(("page", "text"), blocks("diff"))
def test_a_script_runs_with_its_added_lines_and_without_them(
    page: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.yml").write_text(json.dumps(HERE))
    x, y = np.zeros([64, 4], np.float32), np.zeros([64], np.int64)
    added = "".join(f"{line[1:]}\n" for line in text.splitlines() if line[:1] in "+ ")
    alone = "".join(f"{line[1:]}\n" for line in text.splitlines() if line[:1] == " " or not line)
    for script in (added, re.sub(r"^    ", "", alone, flags=re.MULTILINE)):
        (tmp_path / f"{page}.py").write_text(script)
        runpy.run_path(f"{page}.py", {"x": x, "y": y})


@pytest.mark.parametrize(("page", "text"), blocks("yaml"))
def test_yaml_is_taken(page: str, text: str) -> None:
    spec = yaml.safe_load(text)
    ResourceSpec.from_dict(spec if "nodes" in spec else HERE | spec)


COMMANDS = sorted(
    {line for text in PAGES.values() for line in re.findall(r"^ {4,}(?:srun )?(autodist .*)$", text, re.M)}
)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_has_these_options(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "cluster.yml", "ps.json", "parallax.json"):
        (tmp_path / name).touch()
    (tmp_path / "FOLDER").mkdir()
    _, command, *arguments = shlex.split(line.split(" > ", maxsplit=1)[0])
    group: Any = typer.main.get_command(app)
    group.commands[command].make_context(command, arguments)


def texts_of(file: Path) -> Iterator[str]:
    """Yields the complete texts of a file of the package, with `…` for the inserted values."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)


def quotes() -> list[str]:
    """Returns the quoted messages of the pages, each as one line."""
    lines = re.findall(r"(?:^> .*\n)+", PAGES["troubleshooting.md"], re.MULTILINE)
    return [" ".join(line[2:] for line in quote.splitlines()) for quote in lines]


@functools.cache
def said() -> Collection[str]:
    """All texts of the package."""
    folders = ("autodist", "kernels", "strategies")
    return {text for folder in folders for file in (ROOT / folder).rglob("*.py") for text in texts_of(file)}


@pytest.mark.parametrize("quote", quotes())
def test_what_is_quoted_is_said(quote: str) -> None:
    pieces = [piece.strip() for piece in quote.split("…") if piece.strip(" .")]
    pattern = re.compile(".*".join(map(re.escape, pieces)), re.DOTALL)
    assert any(pattern.search(text) for text in said()), "no message of the package has these words"


def test_every_error_has_its_entry() -> None:
    classes = {
        name for name, of in vars(errors).items() if inspect.isclass(of) and issubclass(of, errors.AutoDistError)
    }
    entries = set(re.findall(r"^### `(\w+)`$", PAGES["troubleshooting.md"], re.MULTILINE))
    assert entries == classes - {"AutoDistError"}


def test_the_api_reference_has_every_method_of_an_autodist() -> None:
    [listed] = re.findall(
        r"^::: autodist.api.AutoDist\n    options: {members: \[(.*)\]}$", PAGES["api.md"], re.MULTILINE
    )
    assert set(listed.split(", ")) == {name for name in vars(AutoDist) if not name.startswith("_")}


DOCS = [page for page in PAGES if page not in ("README.md", "changelog.md", "contributing.md")]


@pytest.mark.parametrize("page", DOCS)
def test_a_page_begins_with_what_its_reader_can_do(page: str) -> None:
    _, first, *_ = re.split(r"\n\s*\n", PAGES[page])
    assert "After this page, you can " in " ".join(first.split())


def test_the_path_is_short() -> None:
    site = re.findall(r"(?:\d+\. [^:]+|What it is): ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert site[0] == "index.md"
    assert 1 < len(site) <= 8
    assert site[1:] == re.findall(r"^\d\. \[[^]]+\]\(([\w-]+\.md)\)", PAGES["index.md"], re.MULTILINE)


def test_the_reference_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", PAGES["reference.md"] + PAGES["index.md"]))
    assert linked == {page for page in PAGES if page not in ("README.md", "index.md")}


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 120


def test_each_word_is_defined_once() -> None:
    words = re.findall(r"^\| \*([^*]+)\*", PAGES["words.md"], re.MULTILINE)
    assert len(words) > 25
    assert len(set(words)) == len(words)
