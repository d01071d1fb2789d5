"""Actions registered for the import of a module run after that import, and not without it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from autodist.tf_compat.import_hooks import when_imported


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "imported_later_here.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imported_later_here", raising=False)
    return "imported_later_here"


def test_it_acts_once_the_module_is_there(module: str) -> None:
    seen: list[int] = []
    with when_imported(module, lambda: seen.append(sys.modules[module].value)):
        assert seen == []
        imported = importlib.import_module(module)
    assert seen == [3]
    assert type(imported.__loader__).__module__.startswith("_frozen_importlib")
    with when_imported(module, lambda: seen.append(4)):
        assert seen == [3, 4]


def test_modules_imported_after_the_context_are_not_patched(module: str) -> None:
    before, seen = [*sys.meta_path], list[int]()
    with when_imported(module, lambda: seen.append(1)):
        assert before != sys.meta_path
    importlib.import_module(module)
    assert (seen, sys.meta_path) == ([], before)
