"""The built packages: a source distribution, a wheel built from it, and its command, which trains."""

from __future__ import annotations

import os
import pathlib
import secrets
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest
from packaging.metadata import Metadata

from tests.cluster.runs import MARK, all_gone
from tests.unit.test_packaging import FOLDERS, PROJECT, PROTOS, ROOT, installed_name, sources

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def run_backend(tree: pathlib.Path, backend: pathlib.Path, call: str, target: pathlib.Path) -> pathlib.Path:
    """Calls a hook of the build backend in a source tree; returns the built file."""
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
    """Returns an environment with the build requirements of pyproject.toml, as pip would install them in isolation."""
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
    (directory / "tree" / "proto" / "removed_pb2.pyi").write_text("# compiled from a proto that is gone")
    built = run_backend(directory / "tree", backend, "build_sdist", directory / "built")
    (directory / "unpacked").mkdir()
    # Not tarfile: some versions from 3.11 to 3.13 have no extraction filter, and some warn without one.
    subprocess.run(["tar", "xf", built, "-C", directory / "unpacked"], check=True, timeout=60)
    (unpacked,) = (directory / "unpacked").iterdir()
    return unpacked


@pytest.fixture(scope="module")
def packed(sdist: pathlib.Path, backend: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A wheel built from the source distribution."""
    return run_backend(sdist, backend, "build_wheel", tmp_path_factory.mktemp("wheel") / "built")


@pytest.fixture(scope="module")
def wheel(packed: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The wheel, unpacked."""
    directory = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(packed) as archive:
        archive.extractall(directory)
    return directory


@pytest.fixture(scope="module")
def installed(packed: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Returns the folder of commands of an environment that has the wheel installed, and this environment's
    dependencies.

    Editable installs are not followed through .pth files, so that an editable AutoDist is not found there.
    """
    directory = tmp_path_factory.mktemp("environment")
    venv.create(directory, with_pip=False)
    python = directory / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    done = subprocess.run([*command, str(packed)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    (own,) = directory.glob("lib/python*/site-packages")
    (own / "others.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("site-packages")))
    return directory / "bin"


def test_the_source_distribution_holds_sources_and_nothing_generated(sdist: pathlib.Path) -> None:
    assert [*sdist.rglob("*_pb2.pyi"), *sdist.rglob("*.binpb")] == []
    assert {path.stem for path in (sdist / "proto").glob("*.proto")} == set(PROTOS)
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "scripts/demo", "scripts/test", "examples/cluster.yml"):
        assert (sdist / name).is_file(), name


def test_the_wheel_holds_the_package_and_nothing_else(wheel: pathlib.Path) -> None:
    presets = {installed_name(path) for path in (ROOT / "strategies" / "presets").glob("*.yml")}
    made = {f"autodist/proto/{proto}{end}" for proto in PROTOS for end in (".proto", "_pb2.pyi")}
    others = {"autodist/proto/messages.binpb", "autodist/py.typed"}
    files = {str(path.relative_to(wheel)) for path in wheel.rglob("*") if path.is_file()}
    assert {name for name in files if ".dist-info/" not in name} == sources() | presets | made | others
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in files)


def test_an_index_takes_its_metadata(wheel: pathlib.Path) -> None:
    (about,) = wheel.glob("*.dist-info/METADATA")
    reported = Metadata.from_email(about.read_bytes(), validate=True)
    assert (reported.name, reported.description_content_type) == (PROJECT["project"]["name"], "text/markdown")
    assert "# AutoDist" in (reported.description or "")
    assert reported.license_expression == PROJECT["project"]["license"]
    assert set(reported.provides_extra or ()) >= {"gpu"}


def test_its_command_trains_an_example_as_on_one_device(
    installed: pathlib.Path, sdist: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    mark = secrets.token_hex(8)
    examples = tmp_path / "examples"
    shutil.copytree(sdist / "examples", examples)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = kept | {MARK: mark, "COLUMNS": "120"}
    command = [str(installed / "autodist"), "verify", "--workers", "2", "--steps", "2", "digits_step.py"]
    done = subprocess.run(
        command, cwd=examples, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "alike: 2 steps on 2 workers" in done.stdout
    assert all_gone(mark)


def test_what_the_wheel_holds_can_be_imported(installed: pathlib.Path, tmp_path: pathlib.Path) -> None:
    names = [f"autodist.{folder}" for folder in FOLDERS] + [f"autodist.proto.{proto}_pb2" for proto in PROTOS]
    code = f"import importlib\nfor name in {names}: print(importlib.import_module(name).__file__)"
    command = [str(installed / "python"), "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert all(pathlib.Path(line).is_relative_to(installed.parent) for line in done.stdout.splitlines()), done.stdout
    assert len(done.stdout.splitlines()) == len(names)
