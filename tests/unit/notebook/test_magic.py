"""`%%autodist`, with a notebook simulated by a mapping of names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import autodist
from autodist.errors import LaunchError
from autodist.notebook import magic
from autodist.notebook.magic import read_options


class Notebook:
    """The parts of IPython that the extension uses."""

    def __init__(self, **names: Any) -> None:
        self.user_ns = names

    def register_magic_function(self, function: Callable[[str, str], None], kind: str, name: str) -> None:
        assert (kind, name) == ("cell", "autodist")
        self.run = function


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    """A notebook whose cells run here, with a text in place of the AutoDist."""

    def launch(function: Callable[..., Any], *args: Any, **where: Any) -> Any:
        notebook.where = where
        return function("the AutoDist", *args)

    monkeypatch.setattr(magic, "launch", launch)
    notebook = Notebook(x=3, y=4, _hidden=5)
    autodist.load_ipython_extension(notebook)
    return notebook


def test_a_cell_takes_and_leaves_the_names_that_are_asked_for(notebook: Notebook) -> None:
    notebook.run("--workers 2 --strategy PS --in x,y --out z, --cluster 'a b.yml'", "z = x + y\nw = ad")
    assert notebook.user_ns == {"x": 3, "y": 4, "_hidden": 5, "z": 7}
    assert notebook.where == {"cluster": "a b.yml", "strategy": "PS", "workers": 2, "replicas": None}
    notebook.run("--out said", "said = ad, __name__")
    assert notebook.user_ns["said"] == ("the AutoDist", "__main__")


def test_a_name_of_another_cell_is_told_with_the_option_that_brings_it(notebook: Notebook) -> None:
    with pytest.raises(NameError) as caught:
        notebook.run("--in y", "y + x")
    assert caught.value.__notes__ == ["The notebook has x: %%autodist --in x copies it to the workers."]
    with pytest.raises(NameError) as caught:
        notebook.run("", "nowhere")
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize(
    ("line", "cell", "error", "said"),
    [
        ("--in a", "", LaunchError, "--in names a, which does not exist in this notebook"),
        ("--out a", "b = 1", LaunchError, "--out names a, which the cell did not define"),
        ("--in 1a", "", LaunchError, "'1a' is not a name.*usage: %%autodist"),
        ("--worker 2", "", LaunchError, "unrecognized arguments: --worker 2"),
        ("--workers two", "", LaunchError, "invalid int value: 'two'"),
        ("train.py", "", LaunchError, "unrecognized arguments"),
        ("--cluster 'a", "", LaunchError, "No closing quotation"),
        ("", "a +", SyntaxError, "invalid syntax"),
    ],
)
def test_what_is_wrong_is_told(notebook: Notebook, line: str, cell: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        notebook.run(line, cell)


def test_options_that_are_left_out_say_nothing() -> None:
    assert vars(read_options("")) == {
        "cluster": None, "strategy": None, "workers": None, "replicas": None, "ins": (), "outs": ()
    }  # fmt: skip
