from __future__ import annotations

import inspect
import linecache
import tempfile
import traceback
from pathlib import Path

import pytest
import tensorflow as tf

import autodist.api  # noqa: F401  (loads AutoGraph's code from memory)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    return tmp_path


def collatz(x: tf.Tensor) -> tf.Tensor:
    steps = 0
    while x > 1:
        x = tf.where(x % 2 == 0, x // 2, 3 * x + 1)
        steps += 1
    return steps


def fails(x: tf.Tensor) -> tf.Tensor:
    if x > 0:
        x = x + 1
    raise ValueError("on purpose")


def test_converted_functions_leave_no_file(temporary: Path) -> None:
    assert int(tf.function(collatz)(tf.constant(6))) == 8
    assert list(temporary.iterdir()) == []


def test_generated_code_can_be_looked_at(temporary: Path) -> None:
    converted = tf.autograph.to_graph(collatz)
    linecache.checkcache()
    assert "ag__.while_stmt" in inspect.getsource(converted)
    assert inspect.getsourcefile(converted) == converted.__code__.co_filename
    assert list(temporary.iterdir()) == []


def test_error_names_the_line_of_the_user_and_the_traceback_shows_generated_lines(temporary: Path) -> None:
    with pytest.raises(ValueError, match="on purpose") as raised:
        tf.function(fails)(tf.constant(1))
    line = inspect.getsourcelines(fails)[1] + 3
    assert f'File "{__file__}", line {line}, in fails' in str(raised.value)
    with pytest.raises(ValueError, match="on purpose") as raised:
        tf.autograph.to_graph(fails)(1)
    assert "raise ag__.converted_call(ag__.ld(ValueError)" in "".join(traceback.format_exception(raised.value))
