"""docs/extending.md: `git apply` accepts each diff of the page, and the added tests pass."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.docs.pages import ROOT, patches

NEW_CASE = "bits that are set"
"""The case that the page adds to a file of tests whose other cases run elsewhere."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, its folders mapped into it as an installation has them, and of the tests."""
    made = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__", "*.xz", "*.zip")
    for folder in ("autodist", "strategies", "kernels", "proto", "tests"):
        shutil.copytree(ROOT / folder, made / folder, ignore=ignored)
    for folder in ("strategies", "kernels", "proto"):
        (made / "autodist" / folder).symlink_to(made / folder)
    shutil.copy(ROOT / "pyproject.toml", made)
    return made


@pytest.mark.slow
def test_each_diff_applies_and_its_tests_pass(tree: Path) -> None:
    found = patches("extending.md")
    assert len(found) == 3
    files = [name for patch in found for name in re.findall(r"^\+\+\+ b/(tests/.*)$", patch, re.MULTILINE)]
    assert len(files) == 3
    for patch in found:
        command = ["git", "apply", "--whitespace=error", "-"]
        done = subprocess.run(command, cwd=tree, input=patch, text=True, capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
    chosen = f"mean_sign or large_by_server or LargeByServer or has_a_preset or ({NEW_CASE.replace(' ', ' and ')})"
    said = pytest_in(tree, *files, "tests/unit/strategies/test_presets.py", "-k", chosen)
    assert re.search(r"^7 passed", said, re.MULTILINE), said


def pytest_in(tree: Path, *arguments: str) -> str:
    """Returns pytest's output for tests in a tree, run with the package of that tree."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = kept | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, text=True, capture_output=True, timeout=300, check=False)
    return done.stdout + done.stderr
