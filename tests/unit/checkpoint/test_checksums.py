"""Written files match their checksums, and changed files do not."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from autodist.checkpoint import files as module
from autodist.checkpoint.files import checksum, checksums, sealed, unsealed

CONTENT = {
    "step": 3,
    "rate": 0.1,
    "none": None,
    "by_number": {2: [1, "a"], 10: True},
    "best": -math.inf,
    "name": "\u00fc",
}


def test_a_file_has_the_same_checksum_in_whatever_chunks_it_is_read(tmp_path, monkeypatch):
    content = os.urandom(1000)
    (tmp_path / "file").write_bytes(content)
    path = str(tmp_path / "file")
    assert checksum(path) == f"{zlib.crc32(content):08x}"
    monkeypatch.setattr(module, "_CHUNK", 7)
    assert checksum(path) == f"{zlib.crc32(content):08x}"


@pytest.mark.parametrize("readers", [1, 3])
def test_files_are_told_apart(tmp_path, readers):
    paths = [str(tmp_path / str(k)) for k in range(5)]
    for k, path in enumerate(paths):
        Path(path).write_bytes(b"a" * k)
    found = checksums(paths, readers)
    assert list(found) == paths and len(set(found.values())) == 5
    assert checksums([]) == {}


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(FileNotFoundError):
        checksums([str(tmp_path / "a"), str(tmp_path / "b")])


def test_text_with_a_checksum_is_json_and_is_read_back():
    text = sealed(CONTENT)
    assert json.loads(text)["step"] == 3
    assert unsealed(text) == json.loads(json.dumps(CONTENT))
    assert unsealed(json.dumps(json.loads(text))) == unsealed(text)  # rewritten, in one line


def test_a_changed_byte_is_refused_or_changes_nothing():
    """Some changed bytes, for example another kind of space, have the same meaning."""
    text, refused = sealed(CONTENT), 0
    for k in range(len(text)):
        for other in '7 "a,}':
            try:
                found = unsealed(text[:k] + other + text[k + 1 :])
            except (ValueError, TypeError):
                refused += 1
            else:
                assert found == unsealed(text)
    assert refused > 4 * len(text)


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"crc32": ""}', sealed({"a": 1}).replace('"crc32"', '"crc33"')])
def test_text_without_a_checksum_is_refused(text):
    with pytest.raises(ValueError, match=r".+"):
        unsealed(text)


@pytest.mark.processes
def test_checksums_are_computed_after_the_end_of_a_script_too(tmp_path):
    code = (  # the module alone, without the package, which imports TensorFlow
        "import atexit, sys\nsys.path.insert(0, sys.argv.pop(1))\nfrom files import checksum, checksums\n"
        "atexit.register(lambda: print(checksums(sys.argv[1:]) == {path: checksum(path) for path in sys.argv[1:]}))"
    )
    paths = [str(tmp_path / name) for name in "abc"]
    for path in paths:
        Path(path).write_text(path)
    ended = subprocess.run(
        [sys.executable, "-c", code, str(Path(module.__file__).parent), *paths],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert ended.stdout == "True\n", ended.stderr
