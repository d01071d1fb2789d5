"""What is installed: every folder, the protos compiled by the right compiler, the versions that the files agree on."""

from __future__ import annotations

import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
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


def run_backend(tree: pathlib.Path, backend: pathlib.Path, call: str, target: pathlib.Path) -> pathlib.Path:
    """Calls a hook of the build backend in a source tree; returns what it built."""
    code = f"import sys; sys.path.insert(0, sys.argv[1]); from setuptools import build_meta as b; b.{call}(sys.argv[2])"
    command = [sys.executable, "-c", code, str(backend), str(target)]
    target.mkdir()
    environment = {"PYTHONPATH": str(backend), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """What pyproject.toml asks for to build with, as pip would bring it into an isolated environment."""
    target = tmp_path_factory.mktemp("backend")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--target",
        str(target),
    ]
    done = subprocess.run(
        [*command, *PROJECT["build-system"]["requires"]], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def sdist(backend: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A source distribution, unpacked. It is built from a copy, so that nothing in the checkout changes."""
    directory = tmp_path_factory.mktemp("sdist")
    ignore = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, directory / "tree", ignore=ignore)
    (directory / "tree" / "proto" / "removed_pb2.py").write_text("# compiled from a proto that is gone")
    built = run_backend(directory / "tree", backend, "build_sdist", directory / "built")
    (directory / "unpacked").mkdir()
    # Not tarfile: of Python 3.11 to 3.13 some have no extraction filter, and some warn where none is given.
    subprocess.run(["tar", "xf", built, "-C", directory / "unpacked"], check=True, timeout=60)
    (unpacked,) = (directory / "unpacked").iterdir()
    return unpacked


@pytest.fixture(scope="module")
def wheel(sdist: pathlib.Path, backend: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A wheel built from the source distribution, unpacked."""
    directory = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(run_backend(sdist, backend, "build_wheel", directory / "built")) as archive:
        archive.extractall(directory / "unpacked")
    return directory / "unpacked"


@pytest.mark.slow
def test_the_source_distribution_holds_sources_and_nothing_generated(sdist: pathlib.Path) -> None:
    assert list(sdist.rglob("*_pb2.py*")) == []
    assert {path.stem for path in (sdist / "proto").glob("*.proto")} == set(PROTOS)
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "scripts/demo", "scripts/test", "examples/cluster.yml"):
        assert (sdist / name).is_file(), name


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel: pathlib.Path) -> None:
    presets = {installed_name(path) for path in (ROOT / "strategies" / "presets").glob("*.yml")}
    made = {f"autodist/proto/{proto}{end}" for proto in PROTOS for end in (".proto", "_pb2.py", "_pb2.pyi")}
    files = {str(path.relative_to(wheel)) for path in wheel.rglob("*") if path.is_file()}
    assert {name for name in files if ".dist-info/" not in name} == sources() | presets | made | {"autodist/py.typed"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in files)


@pytest.mark.slow
def test_the_wheel_has_the_protos_compiled_by_the_compiler_of_the_lowest_protobuf(wheel: pathlib.Path) -> None:
    for proto in PROTOS:
        assert LINE_OF_COMPILER in (wheel / "autodist" / "proto" / f"{proto}_pb2.py").read_text(encoding="utf-8")


@pytest.mark.slow
def test_what_the_wheel_holds_can_be_imported(wheel: pathlib.Path) -> None:
    names = [f"autodist.{folder}" for folder in FOLDERS] + [f"autodist.proto.{proto}_pb2" for proto in PROTOS]
    code = f"import importlib\nfor name in {names}: print(importlib.import_module(name).__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=wheel, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(str(wheel)) for line in done.stdout.splitlines()), done.stdout
    assert len(done.stdout.splitlines()) == len(names)
