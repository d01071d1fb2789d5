"""The messages on unsupported versions, and on untested ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from importlib import metadata

import pytest

from autodist import versions
from autodist.errors import AutoDistError, UnsupportedVersionError

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Pretends that exactly these packages are installed, and this Python."""
    versions.has_package.cache_clear()

    def pretend(packages: dict[str, str], python: tuple[int, int] = (3, 12)) -> None:
        def version(name: str) -> str:
            if name not in packages:
                raise metadata.PackageNotFoundError(name)
            return packages[name]

        monkeypatch.setattr(versions.metadata, "version", version)
        monkeypatch.setattr(versions.sys, "version_info", (*python, 0, "final", 0))

    yield pretend
    versions.has_package.cache_clear()


def refusal() -> UnsupportedVersionError:
    with pytest.raises(UnsupportedVersionError) as caught:
        versions.check_versions()
    return caught.value


def test_what_is_installed_here_is_supported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="autodist"):
        versions.check_versions()
    assert caplog.records == []


@pytest.mark.parametrize("python", [(3, 11), (3, 12), (3, 13)])
@pytest.mark.parametrize("tensorflow", ["2.18.0", "2.19.1", "2.20.0rc1", "2.21.3", "2.21.0+cpu"])
@pytest.mark.parametrize("protobuf", ["4.25.0", "5.29.6", "6.31.1", "7.36.2"])
def test_supported_versions_are_taken_without_a_word(
    install: Install, caplog: pytest.LogCaptureFixture, python: tuple[int, int], tensorflow: str, protobuf: str
) -> None:
    install({"tensorflow": tensorflow, "keras": "3.8.0", "protobuf": protobuf}, python)
    versions.check_versions()
    assert caplog.records == []


@pytest.mark.parametrize("found", ["2.22.0", "2.22.0.dev20260101", "3.0.0"])
def test_a_newer_tensorflow_is_warned_of_with_found_tested_and_mend(
    install: Install, caplog: pytest.LogCaptureFixture, found: str
) -> None:
    install({"tensorflow": found, "protobuf": "6.31.1"})
    versions.check_versions()
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("autodist", logging.WARNING)
    for part in (f"TensorFlow {found}", "tested with 2.18 to 2.21", "pip install 'tensorflow==2.21.*'"):
        assert part in record.getMessage()


@pytest.mark.parametrize("found", ["2.17.1", "2.9.0", "1.15.5", "unknown"])
def test_an_old_tensorflow_is_refused_with_found_needed_and_mend(install: Install, found: str) -> None:
    install({"tensorflow": found, "protobuf": "6.31.1"})
    error = refusal()
    assert (error.package, error.found) == ("TensorFlow", found)
    assert str(error) == (
        f"TensorFlow {found} is installed; AutoDist needs TensorFlow 2.18 to 2.21. "
        "Fix: pip install 'tensorflow==2.21.*'"
    )


def test_a_missing_tensorflow_is_refused(install: Install) -> None:
    install({"protobuf": "6.31.1"})
    error = refusal()
    assert (error.package, error.found) == ("TensorFlow", None)
    assert str(error).startswith("TensorFlow is not installed; ")


@pytest.mark.parametrize("name", ["tensorflow-cpu", "tf-nightly"])
def test_tensorflow_is_found_under_its_other_names(install: Install, name: str) -> None:
    install({name: "2.17.0", "protobuf": "6.31.1"})
    assert refusal().found == "2.17.0"


@pytest.mark.parametrize(("python", "text"), [((3, 10), "3.10"), ((3, 14), "3.14"), ((2, 7), "2.7")])
def test_another_python_is_refused_before_anything_else(install: Install, python: tuple[int, int], text: str) -> None:
    install({}, python)
    error = refusal()
    assert (error.package, error.found, error.needed) == ("Python", text, "3.11 to 3.13")
    assert "virtual environment" in error.mend


@pytest.mark.parametrize("package, found, lowest", [("protobuf", "4.24.4", "4.25"), ("keras", "3.7.0", "3.8")])
def test_an_older_package_is_refused_with_the_lowest_version_and_the_command(
    install: Install, package: str, found: str, lowest: str
) -> None:
    install({"tensorflow": "2.18.0", package: found})
    error = refusal()
    assert (error.package, error.found, error.needed) == (package, found, f"{lowest} or newer")
    assert error.mend == f"pip install '{package}>={lowest}'"


def test_the_refusal_is_caught_as_our_error_and_as_an_import_error() -> None:
    assert issubclass(UnsupportedVersionError, AutoDistError)
    assert issubclass(UnsupportedVersionError, ImportError)
