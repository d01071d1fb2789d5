"""Faults in resource files, and the message for each: file, line, key and allowed values."""

from __future__ import annotations

import pathlib

import pytest

from autodist.errors import Place, ResourceSpecError
from autodist.resources import ResourceSpec

HEAD = "nodes:\n  - {address: 10.0.0.1, chief: true}\n"
NODE = "nodes:\n  - address: 10.0.0.1\n    "

Fault = tuple[str, int, str, str]
"""A text, the line and the key of its fault, and the beginning of the message."""


def read(tmp_path: pathlib.Path, content: str | bytes) -> tuple[str, ResourceSpecError]:
    path = tmp_path / "cluster.yml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ResourceSpecError) as caught:
        ResourceSpec.from_file(path)
    return str(path), caught.value


def assert_is_told(tmp_path: pathlib.Path, fault: Fault) -> None:
    text, line, key, problem = fault
    file, error = read(tmp_path, text)
    assert error.place == Place(file, line, key)
    assert error.problem.startswith(problem)
    assert str(error).startswith(f"{file}:{line}: {key}: {problem}")
    assert "pydantic" not in str(error) and "Input should" not in str(error)
