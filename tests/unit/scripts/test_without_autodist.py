"""scripts/without_autodist.py: scripts before and after, and its errors."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys
import textwrap

import pytest

from tests.loaded_scripts import ROOT, load_script

SCRIPT = ROOT / "scripts" / "without_autodist.py"
# own_builder.py is no script: a YAML names it.
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.stem != "own_builder")


without = load_script("without_autodist")


def check(before: str, after: str) -> None:
    """The lines `before`, below a line that makes the object `ad`, become the lines `after`."""
    head = "from autodist import AutoDist\nad = AutoDist('cluster.yml')\n"
    assert without.without_autodist(head + textwrap.dedent(before)) == textwrap.dedent(after)


def test_a_script_without_autodist_stays_as_it_is() -> None:
    script = "import tensorflow as tf\n\n# ad.is_chief\nad = 'AutoDist'\nprint(ad.upper())\n"
    assert without.without_autodist(script) == script


def test_a_scope_alone_becomes_if_true() -> None:
    check(
        """\
        with ad.scope():  # here
            x = 1
        """,
        """\
        if True:  # here
            x = 1
        """,
    )


@pytest.mark.parametrize(
    "before",
    [
        "with graph.as_default(), ad.scope():\n    pass\n",
        "with ad.scope(), graph.as_default():\n    pass\n",
    ],
)
def test_a_scope_beside_another_context_goes(before: str) -> None:
    check(before, "with graph.as_default():\n    pass\n")


def test_a_scope_between_other_contexts_goes() -> None:
    check("with a() as b, ad.scope(), c():\n    pass\n", "with a() as b, c():\n    pass\n")


def test_contexts_of_others_are_left() -> None:
    check("with thing.scope() as x, open(p):\n    pass\n", "with thing.scope() as x, open(p):\n    pass\n")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("@ad.function\ndef f(): ...\n", "@tf.function\ndef f(): ...\n"),
        ("f = ad.function(f)\n", "f = tf.function(f)\n"),
        ('@ad.function(batch="global")\ndef f(): ...\n', "@tf.function\ndef f(): ...\n"),
        ("@ad.function()\ndef f(): ...\n", "@tf.function\ndef f(): ...\n"),
        (
            "@ad.function(batch='global', jit_compile=True)\ndef f(): ...\n",
            "@tf.function(jit_compile=True)\ndef f(): ...\n",
        ),
        (
            "@ad.function(\n    jit_compile=ad.is_chief,  # here\n    batch='global',\n)\ndef f(): ...\n",
            "@tf.function(\n    jit_compile=True,\n)\ndef f(): ...\n",
        ),
        ("f = ad.function(g, batch='global', batch_axis={'x': n(1)})\n", "f = tf.function(g)\n"),
        (
            "f = ad.function(batch_axis={}, step=g, batch='global', jit_compile=b)\n",
            "f = tf.function(func=g, jit_compile=b)\n",
        ),
        ("f = ad.function(batch='global')(f)\n", "f = tf.function(f)\n"),
        ("sess = ad.create_distributed_session()\n", "sess = tf.compat.v1.Session()\n"),
        ("if ad.is_chief: pass\n", "if True: pass\n"),
        ("part = x[ad.worker_index :: ad.num_workers]\n", "part = x[0 :: 1]\n"),
        ("n = ad.num_replicas + ad.num_replicas_in_sync\n", "n = 1 + 1\n"),
        ("print('é', ad.is_chief)\n", "print('é', True)\n"),
        ("a = 1\nad.pull()  # now\nb = 2\n", "a = 1\nb = 2\n"),
        ("if a:\n    ad.pull()\n", "if a:\n    pass\n"),
        ("a = 1; ad.pull()\n", "a = 1; pass\n"),
        ("x = ad.reduce(loss, 'mean')\n", "x = loss\n"),
        ("x = 2 * ad.reduce(a + b, 'mean')\n", "x = 2 * (a + b)\n"),
        ("x = ad.reduce(part / ad.num_workers, 'sum')\n", "x = (part / 1)\n"),
        ("data = ad.distribute_dataset(make(3))\n", "data = make(3)\n"),
        ("rows = ad.batch_slice(n, min(n + 64, 90))\n", "rows = slice(n, min(n + 64, 90))\n"),
        ("text = 'ad.is_chief'  # ad.pull()\n", "text = 'ad.is_chief'  # ad.pull()\n"),
    ],
)
def test_what_is_asked_of_autodist_becomes_what_one_device_answers(before: str, after: str) -> None:
    check(before, after)


def test_statements_over_several_lines_go_whole() -> None:
    script = "from autodist import (\n    AutoDist,\n)\nx = 1\nad = AutoDist(\n    path,  # machines\n)\ny = 2\n"
    assert without.without_autodist(script) == "x = 1\ny = 2\n"


def test_the_object_may_have_another_name_and_be_used_above() -> None:
    script = "import autodist\ndef f():\n    return dist.is_chief\ndist = autodist.AutoDist()\n"
    assert without.without_autodist(script) == "def f():\n    return True\n"


@pytest.mark.parametrize(
    "before",
    [
        "strategy = ad.strategy\n",
        "train(ad)\n",
        "with ad.scope() as scope:\n    pass\n",
        "other = [AutoDist()]\n",
        "self.ad = AutoDist()\n",
        "import autodist, os\n",
        "x = ad.reduce(ad.strategy, 'mean')\n",
    ],
)
def test_what_has_no_counterpart_is_refused_with_its_line(before: str) -> None:
    with pytest.raises(without.LeftOverError, match=r"line 3: .* has no counterpart on one device") as error:
        check(before, "")
    assert error.value.line == 3


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_nothing_of_autodist_is_left_of_an_example(example: pathlib.Path) -> None:
    before = example.read_text(encoding="utf-8")
    after = without.without_autodist(before)
    names = {node.id for node in ast.walk(ast.parse(after)) if isinstance(node, ast.Name)}
    assert "ad = AutoDist(" in before
    assert not names & {"ad", "AutoDist", "autodist"}
    assert "autodist import" not in after


def test_the_examples_are_there() -> None:
    assert {"digits_keras", "digits_step", "digits_tf1", "char_language_model", "skip_gram"} <= {
        path.stem for path in EXAMPLES
    }


def test_the_command_prints_the_script(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from autodist import AutoDist\nad = AutoDist()\nprint('é', ad.num_workers)\n", encoding="utf-8")
    command = [sys.executable, str(SCRIPT), str(script)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60, encoding="utf-8")
    assert done.stdout == "print('é', 1)\n"


def test_the_command_names_the_file_and_the_line(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from autodist import AutoDist\nad = AutoDist()\nprint(ad.strategy)\n", encoding="utf-8")
    command = [sys.executable, str(SCRIPT), str(script)]
    done = subprocess.run(command, capture_output=True, check=False, timeout=60, encoding="utf-8")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{script}: line 3: 'ad.strategy' has no counterpart" in done.stderr
