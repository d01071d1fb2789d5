"""The installed package: every folder, the protos compiled by the right compiler, consistent versions in all files."""

from __future__ import annotations

import pathlib
import re
import runpy
import subprocess
import sys
import tomllib
from typing import Any

import google.protobuf
import pytest
from packaging.requirements import Requirement

import autodist
from autodist import versions
from autodist.proto import strategy_pb2

ROOT = pathlib.Path(__file__).resolve().parents[2]
SETUP: dict[str, Any] = runpy.run_path(str(ROOT / "setup.py"))
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS: tuple[str, ...] = SETUP["FOLDERS"]
PROTOS = sorted(path.stem for path in (ROOT / "proto").glob("*.proto"))
LOWEST_PROTOBUF = ".".join(map(str, versions.LOWEST_PROTOBUF))
LINE_OF_COMPILER = f"# Protobuf Python Version: {LOWEST_PROTOBUF}\n"


def installed_name(path: pathlib.Path) -> str:
    """The path inside the package of a file in the checkout."""
    relative = path.relative_to(ROOT)
    return str(relative if relative.parts[0] == "autodist" else "autodist" / relative)


def sources() -> set[str]:
    """Names inside the package of all Python files of the checkout that are not generated."""
    paths = [path for folder in ("autodist", *FOLDERS) for path in (ROOT / folder).rglob("*.py")]
    return {installed_name(path) for path in paths if not path.name.endswith("_pb2.py")}


def test_no_folder_with_python_files_is_forgotten() -> None:
    folders = {str(pathlib.PurePath(name).parent).replace("/", ".") for name in sources()}
    assert folders == set(SETUP["all_packages"]())
    assert {"autodist", *(f"autodist.{folder}" for folder in FOLDERS)} <= folders


@pytest.mark.parametrize("proto", PROTOS)
def test_protos_are_compiled_by_the_compiler_of_the_lowest_protobuf(proto: str) -> None:
    assert LINE_OF_COMPILER in (ROOT / "proto" / f"{proto}_pb2.py").read_text(encoding="utf-8")


def test_generated_code_is_taken_without_a_warning_by_the_protobuf_that_is_installed() -> None:
    code = "".join(f"from autodist.proto import {proto}_pb2\n" for proto in PROTOS)
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), google.protobuf.__version__


def test_a_strategy_survives_its_bytes() -> None:
    field = next(field for field in strategy_pb2.Strategy.DESCRIPTOR.fields if field.type == field.TYPE_STRING)
    written = strategy_pb2.Strategy(**{field.name: "×"})
    read = strategy_pb2.Strategy.FromString(written.SerializeToString())
    assert read == written
    assert read != strategy_pb2.Strategy()


def test_lowest_versions_are_those_that_the_package_asks_for() -> None:
    text = (ROOT / "tests" / "constraints-lowest.txt").read_text(encoding="utf-8")
    pinned = [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]
    python = {"python_version": "3.11"}
    lowest = {pin.name: str(pin.specifier) for pin in pinned if pin.marker is None or pin.marker.evaluate(python)}
    asked = {need.name: str(need.specifier) for need in map(Requirement, PROJECT["project"]["dependencies"])}
    assert asked.pop("tensorflow") == ">={}.{}".format(*versions.SUPPORTED_TENSORFLOW)
    assert {name: version.replace("==", ">=").removesuffix(".0") for name, version in lowest.items()} == asked
    assert asked["protobuf"] == f">={LOWEST_PROTOBUF}"


def test_python_versions_are_those_that_are_checked_at_import() -> None:
    lowest, (major, minor) = versions.LOWEST_PYTHON, versions.HIGHEST_PYTHON
    assert PROJECT["project"]["requires-python"] == f">={lowest[0]}.{lowest[1]},<{major}.{minor + 1}"


def test_package_and_changelog_speak_of_the_same_version() -> None:
    assert autodist.__version__ == PROJECT["project"]["version"]
    version = re.escape(autodist.__version__)
    assert re.search(rf"^## {version}\b", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_mapped_package_for_tools_has_all_folders(tmp_path: pathlib.Path) -> None:
    make = runpy.run_path(str(ROOT / "scripts" / "mapped_package.py"))["make_mapped_package"]
    for _ in range(2):  # the second time over the first
        make(tmp_path)
        for name in sources():
            assert (tmp_path / name).is_file(), name
