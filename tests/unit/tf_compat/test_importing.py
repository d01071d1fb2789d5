"""TensorFlow's import by this package, if no other module has imported it."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from autodist.tf_compat.importing import importing_tensorflow


@pytest.fixture
def collecting() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


@pytest.fixture
def unimported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)


@pytest.mark.usefixtures("unimported", "collecting")
def test_what_is_imported_is_not_searched_for_garbage_and_what_comes_then_is() -> None:
    with importing_tensorflow():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), importing_tensorflow():
        raise ImportError
    assert gc.isenabled()


@pytest.mark.usefixtures("unimported", "collecting")
def test_a_script_that_collects_nothing_does_not_begin_to() -> None:
    gc.disable()
    with importing_tensorflow():
        assert not gc.isenabled()
    assert not gc.isenabled()


@pytest.mark.usefixtures("collecting")
def test_where_tensorflow_is_there_garbage_is_collected_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", sys)
    with importing_tensorflow():
        assert gc.isenabled()


# The finder is called for the first module that imports TensorFlow, and finds none.
FIRST = """
import gc, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            print(gc.isenabled())
            raise ImportError
sys.meta_path.insert(0, Finder())
try:
    from autodist{package} import {name}
except ImportError:
    print(gc.isenabled())
"""


@pytest.mark.parametrize(
    "package, name, module",
    [("", "AutoDist", "autodist.api"), (".compressors", "PowerSGD", "autodist.compressors.eight_bits")],
)
def test_what_the_package_has_is_imported_so(package: str, name: str, module: str) -> None:
    script = FIRST.format(package=package, name=name, module=module)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["False", "True"], done.stderr


# The module behind a name of the package raises AttributeError, like a library without that name.
LACKING = """
import sys, types
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            import importlib.util
            return importlib.util.spec_from_loader(name, self)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        sys.Lacking
sys.meta_path.insert(0, Finder())
{statement}
"""


@pytest.mark.parametrize(
    "statement, module",
    [
        ("from autodist import AutoDist", "autodist.api"),
        ("import autodist; autodist.AutoDist", "autodist.api"),
        ("from autodist.compressors import PowerSGD", "autodist.compressors.built_in"),
    ],
)
def test_an_attribute_error_of_a_module_behind_a_name_is_shown_as_the_cause(statement: str, module: str) -> None:
    script = LACKING.format(module=module, statement=statement)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: {module} cannot be imported: AttributeError: module 'sys' has no attribute")
    assert "docs/versions.md" in last
