"""Command lines, and the values that tools leave in `sys.orig_argv`, `sys.argv` and `__main__` in their versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from autodist.cluster.command_line import Command, Main, TargetKind, script_behind, tool_of


@pytest.mark.parametrize(
    "line", [[], ["python"], ["python", "-i"], ["python", "-"], ["python", "-u", "-", "x"], ["python", "-m"]]
)
def test_nothing_to_run(line: list[str]) -> None:
    assert Command.parse(line) is None


@pytest.mark.parametrize(
    ("line", "kind", "target", "arguments"),
    [
        (["train.py"], TargetKind.FILE, "train.py", ["train.py"]),
        (["-u", "-W", "error", "a b.py", "-c"], TargetKind.FILE, "a b.py", ["-u", "-W", "error", "a b.py", "-c"]),
        (["-Werror", "-Xdev", "train.py"], TargetKind.FILE, "train.py", ["-W", "error", "-X", "dev", "train.py"]),
        (["-BX", "dev", "train.py"], TargetKind.FILE, "train.py", ["-B", "-X", "dev", "train.py"]),
        (
            ["--check-hash-based-pycs", "always", "train.py"],
            TargetKind.FILE,
            "train.py",
            ["--check-hash-based-pycs", "always", "train.py"],
        ),
        (["-m", "package.train", "-i"], TargetKind.MODULE, "package.train", ["-m", "package.train", "-i"]),
        (["-Bum", "package.train"], TargetKind.MODULE, "package.train", ["-Bu", "-m", "package.train"]),
        (["-mpackage.train", "x"], TargetKind.MODULE, "package.train", ["-m", "package.train", "x"]),
        (["-c", "print()", "x"], TargetKind.CODE, "print()", ["-c", "print()", "x"]),
        (["-cimport os\nprint()"], TargetKind.CODE, "import os\nprint()", ["-c", "import os\nprint()"]),
    ],
)
def test_what_is_run_and_how_to_run_it_again(
    line: list[str], kind: TargetKind, target: str, arguments: list[str]
) -> None:
    command = Command.parse(["python", *line])
    assert command is not None
    assert (command.kind, command.target, list(command.arguments)) == (kind, target, arguments)


@pytest.mark.parametrize("options", [["-i"], ["-ui"], ["-iu", "-W", "ignore"], ["-iXdev"]])
def test_nobody_is_waited_for_who_types(options: list[str]) -> None:
    command = Command.parse(["python", *options, "train.py", "-i"])
    assert command is not None
    assert not any("i" in option for option in command.options if option.startswith("-") and option != "-W")
    assert command.rest == ("-i",)


BIN = "/venv/bin"
SITE = "/venv/lib/python3.11/site-packages"
PYTHON = "/usr/lib/python3.11"


@pytest.fixture
def here(tmp_path: Path) -> str:
    (tmp_path / "package").mkdir()
    (tmp_path / "app").mkdir()
    for name in ("train.py", "a b.py", "notes.ipynb", "package/train.py", "package/__main__.py", "app/__main__.py"):
        (tmp_path / name).write_text("")
    return str(tmp_path)


# By tool: its command, `__main__.__file__`, the name in `__main__.__spec__`, `sys.argv[0]`; the code to run.
# Relative paths of files are below the folder of the test.
SCRIPT, MODULE = "{here}/train.py", "{here}/package/train.py"
FORMS = {
    "pdb": (["-m", "pdb", "-c", "c", "train.py", "x", "-m"], SCRIPT, None, "train.py", ["train.py", "x", "-m"]),
    "pdb by its path": ([f"{PYTHON}/pdb.py", "train.py", "x"], SCRIPT, None, "train.py", ["train.py", "x"]),
    "pdb, a module": (
        ["-Bum", "pdb", "-m", "package.train", "x"],
        *(MODULE, "package.train", "package.train"),
        ["-Bu", "-m", "package.train", "x"],
    ),
    "autodist run": (["-m", "autodist.cli.launched", "train.py", "x"], SCRIPT, None, "train.py", ["train.py", "x"]),
    "autodist run, a module": (
        ["-m", "autodist.cli.launched", "-m", "package.train", "x"],
        *(MODULE, "package.train", MODULE),
        ["-m", "package.train", "x"],
    ),
    "cProfile": (
        ["-m", "cProfile", "-o", "out", "a b.py", "x"],
        *(f"{PYTHON}/cProfile.py", "cProfile", "a b.py"),
        ["a b.py", "x"],
    ),
    "cProfile, a module": (
        ["-m", "cProfile", "-m", "package.train", "x"],
        *(f"{PYTHON}/cProfile.py", "cProfile", "package.train"),
        ["-m", "package.train", "x"],
    ),
    "cProfile of Python 3.13": (["-m", "cProfile", "train.py"], SCRIPT, None, "train.py", ["train.py"]),
    "trace": (
        ["-m", "trace", "--count", "-C", "counts", "train.py", "x"],
        *(f"{PYTHON}/trace.py", "trace", "train.py"),
        ["train.py", "x"],
    ),
    "trace, a module": (
        ["-m", "trace", "--count", "--module", "package.train", "x"],
        *(f"{PYTHON}/trace.py", "trace", MODULE),
        ["-m", "package.train", "x"],
    ),
    "coverage": (["-m", "coverage", "run", "train.py", "x"], SCRIPT, None, "train.py", ["train.py", "x"]),
    "coverage by its command": (
        [f"{BIN}/coverage-3.11", "run", "--branch", "train.py"],
        *(SCRIPT, None, "train.py"),
        ["train.py"],
    ),
    "coverage, a module": (
        [f"{BIN}/coverage", "run", "-m", "package", "x"],
        *("{here}/package/__main__.py", "package.__main__", "{here}/package/__main__.py"),
        ["-m", "package", "x"],
    ),
    "coverage, a folder": (["-m", "coverage", "run", "app"], "{here}/app/__main__.py", "__main__", "app", ["app"]),
    "debugpy": (
        ["-X", "frozen_modules=off", "-m", "debugpy", "--listen", "5678", "train.py", "x"],
        *("train.py", None, "train.py"),
        ["-X", "frozen_modules=off", "train.py", "x"],
    ),
    "debugpy, a module": (
        ["-m", "debugpy", "--listen", "5678", "-m", "package.train", "x"],
        *(MODULE, "package.train", MODULE),
        ["-m", "package.train", "x"],
    ),
    "debugpy as an editor starts it": (
        [f"{SITE}/debugpy/adapter/../../debugpy", "--connect", "127.0.0.1:4711", "{here}/train.py", "x"],
        *(SCRIPT, None, SCRIPT),
        ["{here}/train.py", "x"],
    ),
    "pydevd": (
        ["/opt/pycharm/pydevd.py", "--client", "127.0.0.1", "--port", "4711", "--file", "{here}/train.py", "x"],
        *(SCRIPT, None, SCRIPT),
        ["{here}/train.py", "x"],
    ),
    "IPython": ([f"{BIN}/ipython3", "train.py", "x"], "train.py", None, SCRIPT, ["train.py", "x"]),
    "IPython, options": (
        ["-m", "IPython", "train.py", "x", "--", "--y", "--"],
        *("train.py", None, SCRIPT),
        ["train.py", "x", "--y", "--"],
    ),
    "IPython that stays": ([f"{BIN}/ipython", "-i", "--", "train.py"], "train.py", None, SCRIPT, ["train.py"]),
}


@pytest.mark.parametrize("form", FORMS)
def test_script_behind_a_tool_is_found(form: str, here: str) -> None:
    line, file, module, called, expected = FORMS[form]
    command = Command.parse(["python", *(word.format(here=here) for word in line)])
    main = Main(file.format(here=here), module, called.format(here=here))
    assert command is not None
    tool = tool_of(command, main, here)
    assert tool is not None
    behind = script_behind(tool, command, main, here)
    assert behind is not None
    assert list(behind.arguments) == [word.format(here=here) for word in expected]


WITHOUT_A_SCRIPT = {
    "code": (["-m", "code"], Main(f"{PYTHON}/code.py", "code", f"{PYTHON}/code.py")),
    "asyncio": (["-m", "asyncio"], Main(f"{PYTHON}/asyncio/__main__.py", "asyncio.__main__", "")),
    "a kernel": (["-m", "ipykernel_launcher", "-f", "kernel.json"], Main(None, None, f"{SITE}/ipykernel_launcher.py")),
    "IPython": ([f"{BIN}/ipython"], Main(None, None, f"{BIN}/ipython")),
    "%run in a notebook": (["-m", "ipykernel_launcher", "-f", "k.json"], Main("train.py", None, "train.py")),
    "a notebook": ([f"{BIN}/ipython", "notes.ipynb"], Main("notes.ipynb", None, "notes.ipynb")),
    "IDLE": (["-m", "idlelib", "-r", "train.py"], Main(f"{PYTHON}/idlelib/__main__.py", "idlelib.__main__", "")),
    "cProfile, arguments changed": (["-m", "cProfile", "train.py"], Main(f"{PYTHON}/cProfile.py", "cProfile", "")),
}


@pytest.mark.parametrize("form", WITHOUT_A_SCRIPT)
def test_tool_without_a_script_is_known_as_one(form: str, here: str) -> None:
    line, main = WITHOUT_A_SCRIPT[form]
    command = Command.parse(["python", *line])
    assert command is not None
    tool = tool_of(command, main, here)
    assert tool is not None
    assert script_behind(tool, command, main, here) is None


@pytest.mark.parametrize(
    ("line", "file", "module"),
    [
        (["train.py", "coverage"], "train.py", None),
        (["trace.py"], "trace.py", None),  # the user's own
        (["profile", "x"], "profile/__main__.py", "__main__"),  # the same
        (["-m", "code.train"], "code/train.py", "code.train"),
        (["-m", "pytest", "x"], f"{SITE}/pytest/__main__.py", "pytest.__main__"),
        ([f"{BIN}/pytest", "x"], f"{BIN}/pytest", None),
        (["-c", "import pdb"], None, None),
    ],
)
def test_what_is_no_tool_is_started_as_it_was(line: list[str], file: str | None, module: str | None, here: str) -> None:
    Path(here, "trace.py").write_text("")
    Path(here, "profile").mkdir()
    command = Command.parse(["python", *line])
    assert command is not None
    assert tool_of(command, Main(file, module, line[0]), here) is None
