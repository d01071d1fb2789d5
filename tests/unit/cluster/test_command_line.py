from __future__ import annotations

import pytest

from autodist.cluster.command_line import Command, TargetKind


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
