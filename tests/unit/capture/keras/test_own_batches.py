"""The inputs of a `fit` step if a worker reads its own part of each batch, and if it reads whole batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.batch.examples import rows_to_read
from autodist.capture.keras.models import KerasModels
from autodist.errors import CaptureError, ResourceSpecError
from autodist.reading.batch_sharding import GlobalBatch, Reading, Slices
from autodist.reading.file_sharding import FileSharding

X = np.arange(22.0).reshape(11, 2)


SLICES = Slices(lambda examples: (1, examples))


class Steps:
    """Makes steps that record their arguments: the numbers of rows and of examples."""

    def __init__(self) -> None:
        self.given: list[tuple[int, int | None]] = []
        self.given_own: list[tuple[int, int | None]] = []

    def __call__(self, train_step: Callable[..., Any], *_: Any, is_own: bool = False) -> Any:
        given = self.given_own if is_own else self.given

        class Step:
            traces, coming, reads_ahead = 1, (), False
            whole: GlobalBatch | None = None

            def __call__(self, data: Any) -> Any:
                given.append((len(data[0]), None if self.global_batch is None else self.global_batch.examples))
                return {"loss": 0.0}

        return Step()


@pytest.fixture
def steps() -> Steps:
    return Steps()


def model_of(steps: Steps, kind: type[keras.Model] = keras.Sequential, **scope: Any) -> keras.Model:
    with KerasModels(steps, reading=Reading(rows_to_read([0, 1, 1], 1), 2, SLICES)).adopting(**scope):
        model = kind([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_a_step_is_given_a_part_and_told_of_how_many(steps: Steps, steps_per_execution: int) -> None:
    model = model_of(steps)
    model.steps_per_execution = steps_per_execution
    model.fit(X, X[:, :1], batch_size=4, epochs=2, verbose=0)
    assert steps.given == [(2, 4), (2, 4), (2, 3)] * 2


def test_the_rest_after_a_split_is_sharded_and_validation_data_are_not(steps: Steps) -> None:
    model = model_of(steps)
    seen = []
    model.test_function = lambda iterator: seen.append(len(next(iterator)[0])) or {"loss": 0.0}
    model.fit(X, X[:, :1], batch_size=6, validation_split=0.45, verbose=0)
    assert (steps.given, seen) == ([(4, 6)], [5])


def test_inputs_with_another_batch_axis_are_read_whole(steps: Steps) -> None:
    model_of(steps, batch_axis={"y": None}).fit(X, X[:, :1], batch_size=6, verbose=0)
    assert steps.given == [(6, None), (5, None)]


def test_a_function_of_the_scripts_own_trains_on_whole_batches(steps: Steps) -> None:
    model = model_of(steps)
    seen = []
    model.train_function = lambda iterator: seen.append(len(next(iterator)[0])) or {"loss": 0.0}
    model.fit(X, X[:, :1], batch_size=6, verbose=0)
    assert (steps.given, seen) == ([], [6, 5])


def with_files(steps: Steps, **scope: Any) -> keras.Model:
    files = FileSharding([0, 1], 1, ["a", "b"], lambda said, decide: decide([said]), ResourceSpecError)
    with KerasModels(steps, reading=Reading(None, 2, SLICES, files)).adopting(**scope):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # readers of files do not know their length
def test_files_that_are_dealt_out_go_to_a_step_of_parts(steps: Steps, tmp_path: Path) -> None:
    names = [str(tmp_path / str(k)) for k in range(2)]
    for name, count in zip(names, (5, 7), strict=True):
        Path(name).write_text("".join(f"{k}\n" for k in range(count)))
    lines = tf.data.TextLineDataset(names).map(lambda line: tf.strings.to_number([line, line]))
    with_files(steps).fit(lines.map(lambda x: (x, x[:1])).batch(4), epochs=2, verbose=0, shuffle=False)
    assert (steps.given, steps.given_own) == ([], [(2, None), (2, None), (2, None), (1, None)] * 2)


def test_files_are_dealt_out_neither_to_other_axes_nor_to_a_function_of_the_scripts_own(steps: Steps) -> None:
    data = tf.data.TextLineDataset(["a", "b"]).batch(2)
    with pytest.raises(ResourceSpecError, match="no batch_axis, or no `shard`"):
        with_files(steps, batch_axis={"y": None}).fit(data, verbose=0)
    model = with_files(steps)
    model.train_function = lambda iterator: {"loss": 0.0}
    with pytest.raises(ResourceSpecError, match="the script's own train function"):
        model.fit(data, verbose=0)
    with pytest.raises(ResourceSpecError, match="no files that can be sharded"):
        with_files(steps).fit(X, X[:, :1], verbose=0)


class Rows(keras.utils.PyDataset):
    """Batches of up to 4."""

    def __init__(self, cuts: Callable[[int, int], slice], **options: Any) -> None:
        super().__init__(**options)
        self.cuts = cuts

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        rows = self.cuts(4 * index, min(4 * index + 4, 11))
        return X[rows], X[rows, :1]


@pytest.mark.parametrize("threads", [1, 2])
def test_parts_that_a_py_dataset_gives_go_to_a_step_of_parts(steps: Steps, threads: int) -> None:
    model = model_of(steps)
    model.fit(Rows(SLICES, workers=threads), shuffle=False, epochs=2, verbose=0)
    assert (steps.given, steps.given_own) == ([], [(3, None), (3, None), (2, None)] * 2)
    model.fit(Rows(slice), shuffle=False, verbose=0)
    assert steps.given == [(4, None), (4, None), (3, None)]


def test_parts_are_bound_to_no_axis_of_the_first_input_alone(steps: Steps) -> None:
    model_of(steps, batch_axis={"y": None}).fit(Rows(SLICES), shuffle=False, verbose=0)
    assert steps.given_own == [(3, None), (3, None), (2, None)]


@pytest.mark.parametrize(
    "evaluate",
    [
        lambda model: model.evaluate(Rows(SLICES), verbose=0),
        lambda model: model.predict(Rows(SLICES), verbose=0),
        lambda model: model.fit(X, X[:, :1], validation_data=Rows(SLICES), verbose=0),
    ],
)
def test_a_py_dataset_that_gives_parts_evaluates_nothing(steps: Steps, evaluate: Callable[[Any], Any]) -> None:
    with pytest.raises(CaptureError, match=r"Rows uses ad.batch_slice, and .* is evaluated on it.*whole batches"):
        evaluate(model_of(steps))


def test_a_slice_of_no_examples_is_refused() -> None:
    with pytest.raises(ValueError, match="from 4 to 4 is empty"):
        SLICES(4, 4)


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"workers": 1, "use_multiprocessing": True}])
def test_a_py_dataset_that_changes_between_epochs_is_not_read_ahead_if_they_end_within_an_iteration(
    steps: Steps, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a batch may come from before the change on one worker, and from after it on another one."""

    class Changing(keras.utils.PyDataset):
        def __init__(self) -> None:
            super().__init__(**options)
            self.read: list[tuple[int, int]] = []
            self.ends = 0

        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
            self.read.append((index, self.ends))
            return X[:4], X[:4, :1]

        def on_epoch_end(self) -> None:
            time.sleep(0.05)  # so that a thread would read ahead
            self.ends += 1

    data = Changing()
    model_of(steps).fit(data, epochs=2, steps_per_epoch=2, shuffle=False, verbose=0)
    first = data.read[-4][1]  # Keras itself ends an epoch before the first one
    assert data.read[-4:] == [(0, first), (1, first), (2, first + 1), (3, first + 1)]
    assert ("Changing acts on the ends of epochs" in caplog.text) == bool(options)


def test_another_model_that_is_fitted_meanwhile_is_given_whole_batches(steps: Steps) -> None:
    other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    other.compile("sgd", "mse")
    seen = []
    other.train_function = lambda iterator: seen.append(len(next(iterator)[0])) or {"loss": 0.0}

    class FitsFirst(keras.Sequential):
        def fit(self, *args: Any, **kwargs: Any) -> Any:
            other.fit(X, X[:, :1], batch_size=6, verbose=0)
            return super().fit(*args, **kwargs)

    model_of(steps, FitsFirst).fit(X, X[:, :1], batch_size=6, verbose=0)
    assert (steps.given, seen) == ([(4, 6), (3, 5)], [6, 5])
