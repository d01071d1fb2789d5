"""The installed package: every folder, consistent versions in all files."""

from __future__ import annotations

import pathlib
import re
import runpy
import tomllib
from typing import Any

from packaging.requirements import Requirement

import autodist
from autodist import versions

ROOT = pathlib.Path(__file__).resolve().parents[2]
SETUP: dict[str, Any] = runpy.run_path(str(ROOT / "setup.py"))
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS: tuple[str, ...] = SETUP["FOLDERS"]
PROTOS = sorted(path.stem for path in (ROOT / "proto").glob("*.proto"))


def installed_name(path: pathlib.Path) -> str:
    """The path inside the package of a file in the checkout."""
    relative = path.relative_to(ROOT)
    return str(relative if relative.parts[0] == "autodist" else "autodist" / relative)


def sources() -> set[str]:
    """Names inside the package of all Python files of the checkout."""
    paths = [path for folder in ("autodist", *FOLDERS) for path in (ROOT / folder).rglob("*.py")]
    return {installed_name(path) for path in paths}


def test_no_folder_with_python_files_is_forgotten() -> None:
    folders = {str(pathlib.PurePath(name).parent).replace("/", ".") for name in sources()}
    assert folders == set(SETUP["all_packages"]())
    assert {"autodist", *(f"autodist.{folder}" for folder in FOLDERS)} <= folders


def test_lowest_versions_are_those_that_the_package_asks_for() -> None:
    text = (ROOT / "tests" / "constraints-lowest.txt").read_text(encoding="utf-8")
    pinned = [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]
    python = {"python_version": "3.11"}
    lowest = {pin.name: str(pin.specifier) for pin in pinned if pin.marker is None or pin.marker.evaluate(python)}
    asked = {need.name: str(need.specifier) for need in map(Requirement, PROJECT["project"]["dependencies"])}
    assert lowest.pop("tf_keras") == lowest["tensorflow"]  # of the tests alone
    assert {name: version.replace("==", ">=").removesuffix(".0") for name, version in lowest.items()} == asked
    for name in ("tensorflow", "keras", "protobuf"):
        assert asked[name] == ">={}.{}".format(*getattr(versions, f"LOWEST_{name.upper()}"))


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
