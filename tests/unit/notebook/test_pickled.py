"""Values sent between processes, restored in a process that has never seen the notebook."""

from __future__ import annotations

import inspect
import linecache
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tf_keras

from autodist.errors import LaunchError, WorkerFailedError
from autodist.notebook.pickled import KerasSettings, pack, unpack

CELL = """
def inner(x):
    return x + offset

def outer(x):
    return inner(x) * 2
"""


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Names of a notebook in which a cell was run."""
    names: dict[str, Any] = {"__name__": "__main__", "offset": 1}
    monkeypatch.setitem(linecache.cache, "<cell-1>", (len(CELL), None, CELL.splitlines(keepends=True), "<cell-1>"))
    exec(compile(CELL, "<cell-1>", "exec"), names)  # noqa: S102 - as a notebook does
    return names


def test_function_of_a_cell_goes_with_what_it_uses_and_with_its_source(cell: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "packed").write_bytes(pack(cell["outer"], "outer", ""))
    code = """
import inspect, sys
from autodist.notebook.pickled import KerasSettings
from autodist.notebook.pickled import unpack
outer = unpack(open(sys.argv[1], "rb").read())
print(outer(3), repr(inspect.getsource(outer)), repr(inspect.getsource(outer.__globals__["inner"])))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "packed")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    sources = (inspect.getsource(cell["outer"]), inspect.getsource(cell["inner"]))
    assert done.stdout == "8 {!r} {!r}\n".format(*sources)


def test_folder_of_a_module_is_known_to_the_other_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_a_notebook.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    import beside_a_notebook  # type: ignore[import-not-found]

    packed = pack(beside_a_notebook.double, "double", "")
    monkeypatch.delitem(sys.modules, "beside_a_notebook")
    sys.path.remove(str(tmp_path))
    assert unpack(packed)(4) == 8
    monkeypatch.delitem(sys.modules, "beside_a_notebook")
    sys.path.remove(str(tmp_path))
    (tmp_path / "beside_a_notebook.py").unlink()
    with pytest.raises(LaunchError, match="No module named 'beside_a_notebook'.*`sync` in the YAML"):
        unpack(packed)


def test_what_belongs_to_this_process_is_refused_with_the_mend() -> None:
    with pytest.raises(LaunchError, match=r"the lock cannot go to another process \(TypeError: .*\). Leave it."):
        pack(threading.Lock(), "the lock", "Leave it.")


def test_error_with_arguments_of_its_own_comes_back_whole() -> None:
    error = unpack(pack(WorkerFailedError("a:1", "has gone.", ("last",)), "", ""))
    assert isinstance(error, WorkerFailedError)
    assert (error.worker, error.last_lines) == ("a:1", ("last",))
    assert str(error) == str(WorkerFailedError("a:1", "has gone.", ("last",)))


def test_error_of_python_keeps_what_it_has_beside_its_message() -> None:
    error = unpack(pack(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), "", ""))
    assert (error.start, str(error)) == (0, str(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")))
    error = unpack(pack(FileNotFoundError(2, "not there", "a"), "", ""))
    assert (error.errno, error.filename) == (2, "a")


class Doubled(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        return inputs * 2


def test_keras_model_comes_back_with_its_weights_its_optimizer_and_classes_of_the_notebook() -> None:
    # As if it were a cell's: pickled by its content, and known to Keras by no module.
    made = type("Doubled", (Doubled,), {"__module__": "__main__"})
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), made()])
    model.compile(keras.optimizers.Adam(0.25), "mse")
    x, y = np.ones((4, 2)), np.ones((4, 3))
    model.fit(x, y, verbose=0)
    back = unpack(pack({"model": model}, "", ""))["model"]
    for one, other in zip(model.get_weights(), back.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert back.optimizer.iterations.numpy() == 1
    np.testing.assert_array_equal(model.predict(x, verbose=0), back.predict(x, verbose=0))


class Unmade(keras.Model):
    """Keras saves it, and cannot create it again: its `__init__` takes no argument of its configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)


def test_keras_model_that_cannot_be_made_again_is_refused_where_it_is_packed() -> None:
    made = type("Unmade", (Unmade,), {"__module__": "__main__", "__init__": Unmade.__init__})()
    made(np.ones((1, 2)))
    with pytest.raises(
        LaunchError, match=r"the model cannot go to another process \(TypeError: .*`get_config"
    ) as caught:
        pack({"model": made}, "the model", "Leave it.")
    assert len(str(caught.value)) < 600


def test_model_whose_optimizer_has_made_no_step_comes_without_a_warning() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.25), "mse")
    back = unpack(pack(model, "", ""))  # a warning would be an error here
    assert float(back.optimizer.learning_rate) == 0.25


def test_settings_of_keras_are_taken_where_that_is_asked_for() -> None:
    before = settings_of("keras")
    try:
        others = KerasSettings(
            "float64", 1e-5, "channels_first", {"class_name": "DTypePolicy", "config": {"name": "float16"}}
        )
        others.apply()
        packed = pack(lambda: keras.Input((3,)).dtype, "", "")
        before.apply()
        assert unpack(packed)() == before.floatx
        assert keras.config.floatx() == before.floatx
        made = unpack(packed, takes_settings=True)
        assert made() == keras.config.floatx() == "float64"
        assert (keras.config.epsilon(), keras.config.image_data_format()) == (1e-5, "channels_first")
        assert keras.config.dtype_policy().name == "float16"
    finally:
        before.apply()
        keras.config.set_dtype_policy(before.floatx)


def test_the_distribution_that_is_set_is_set_there_too() -> None:
    layouts = keras.distribution.LayoutMap(keras.distribution.DeviceMesh((1, 2), ["batch", "model"]))
    layouts[".*kernel"] = (None, "model")
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layouts))
    packed = pack(keras.distribution.distribution, "", "")
    keras.distribution.set_distribution(None)
    assert unpack(packed)() is None
    found = unpack(packed, takes_settings=True)()
    assert found.get_tensor_layout("dense/kernel").axes == (None, "model")
    assert found.device_mesh.axis_names == ["batch", "model"]


def test_settings_of_tf_keras_are_taken_too() -> None:
    before = settings_of("tf_keras")
    try:
        KerasSettings("float64", 1e-5, "channels_first", "mixed_float16", "tf_keras").apply()
        packed = pack(lambda: (tf_keras.backend.floatx(), tf_keras.layers.Dense(1).compute_dtype), "", "")
        before.apply()
        tf_keras.mixed_precision.set_global_policy(before.floatx)
        assert unpack(packed)() == (before.floatx, before.floatx)
        assert unpack(packed, takes_settings=True)() == ("float64", "float16")
        assert settings_of("tf_keras").image_data_format == "channels_first"
    finally:
        before.apply()
        tf_keras.mixed_precision.set_global_policy(before.floatx)


def settings_of(library: str) -> KerasSettings:
    [found] = [settings for settings in KerasSettings.of_this_process() if settings.library == library]
    return found


def test_what_cannot_be_put_together_is_told() -> None:
    with pytest.raises(LaunchError, match=r"cannot be unpickled \(ZeroDivisionError: .*zero\). Send the values"):
        unpack(pack(Divides(), "", ""))


class Divides:
    def __reduce__(self) -> tuple[Any, ...]:
        return divmod, (1, 0)
