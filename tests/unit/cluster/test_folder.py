"""The files of a folder that are synced to other machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autodist.cluster import folder
from autodist.cluster.folder import find_files
from autodist.errors import ClusterError


def make(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(path)


def test_code_is_synced_and_what_tools_keep_for_themselves_is_not(tmp_path: Path) -> None:
    make(tmp_path, "train.py", "package/model.py", "package/__pycache__/model.pyc", ".git/HEAD", "env/pyvenv.cfg")
    make(tmp_path, "env/lib/x.py", ".env", f".train.py{folder.PART}0a", folder.RECORD)
    assert sorted(find_files(str(tmp_path), ())) == [".env", "package/model.py", "train.py"]


def test_patterns_leave_out_names_anywhere_and_paths_below_the_folder(tmp_path: Path) -> None:
    make(tmp_path, "a.py", "data/x", "package/data/y", "logs/old/z", "logs/new/z", "b.ckpt", "package/c.ckpt")
    assert sorted(find_files(str(tmp_path), ("data/", "*.ckpt", "./logs/old"))) == ["a.py", "logs/new/z"]


def test_links_to_files_are_synced_as_files_and_those_to_folders_are_not(tmp_path: Path) -> None:
    make(tmp_path, "here/a.py", "else/b.py")
    (tmp_path / "here" / "b.py").symlink_to(tmp_path / "else" / "b.py")
    (tmp_path / "here" / "all").symlink_to(tmp_path / "else")
    (tmp_path / "here" / "gone.py").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "here" / "pipe")
    found = find_files(str(tmp_path / "here"), ())
    assert sorted(found) == ["a.py", "b.py"]
    assert found["b.py"].size == len("else/b.py")


def test_a_folder_that_is_not_there_or_holds_more_than_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ClusterError, match="does not exist, or is not a folder; correct `folder`"):
        find_files(str(tmp_path / "absent"), ())
    make(tmp_path, *map(str, range(4)))
    monkeypatch.setattr(folder, "MAX_FILES", 3)
    with pytest.raises(ClusterError, match="holds more than 3 files; list paths that no run needs .* under `exclude`"):
        find_files(str(tmp_path), ())
