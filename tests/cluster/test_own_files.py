"""`shard: files`: workers that read their own files train as one device does on all parts together.

They reduce in subgroups: two of two workers each.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

WORKERS = 4

FOUR = {
    "nodes": [{"address": "localhost", "cpus": list(range(WORKERS)), "workers": WORKERS}],
    "strategy": {"builder": "AllReduce", "all_reduce_spec": "HIERARCHICAL"},
    "shard": "files",
}

COUNTS, BATCH = [13, 14, 0, 22, 9], 10
"""Records of each file; the third worker's one has none, and the second one's are exhausted first."""


def model_of() -> keras.Model:
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, "tanh"),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


SCRIPT = """
ad._run.coordination.are_workers_distinguished = False  # a script of a user's has not asked yet

def example(line):
    numbers = tf.ensure_shape(tf.strings.to_number(tf.strings.split(line, ","), tf.float64), [5])
    return numbers[1:4], numbers[4:], numbers[0]

data = tf.data.TextLineDataset(NAMES).map(example)
pairs = data.map(lambda x, y, number: (x, y)).batch(10).prefetch(2)
refused = []
with ad.scope():
    model = model_of()
    for attempt in (
        lambda: model.fit(np.zeros((4, 3)), np.zeros((4, 1)), verbose=0),
        lambda: model.fit(pairs.take(2), verbose=0),
        lambda: ad.sampler(10, 2),
        lambda: ad.create_distributed_session(),
        lambda: ad.distribute_dataset(tf.data.Dataset.range(9).batch(3)),
    ):
        try:
            attempt()
        except Exception as error:
            refused.append(f"{type(error).__name__}: {error}")
    history = model.fit(pairs, epochs=2, verbose=0).history
    values = {f"fit{k}": v.numpy() for k, v in enumerate([*model.variables, *model.optimizer.variables])}
    evaluated = model.evaluate(pairs, verbose=0)

    w = tf.Variable([[0.1], [0.2], [0.3]], dtype=tf.float64)

    @ad.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ w - y))
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    losses, numbers = [], []
    for x, y, number in ad.distribute_dataset(data.batch(10)):
        losses.append(float(step(x, y)))
        numbers.append(number.numpy())
sizes = [len(part) for part in numbers]
keep(refused=refused, loss=history["loss"], evaluated=evaluated, w=w.numpy(), losses=losses, sizes=sizes,
     numbers=np.concatenate(numbers), **values)
"""


def test_workers_train_on_files_of_their_own_as_one_device_on_their_parts_together(tmp_path: Path) -> None:
    rows, names = records(tmp_path)
    with Training(
        tmp_path / "run", f"import keras\nNAMES = {names!r}\n{inspect.getsource(model_of)}{SCRIPT}", FOUR
    ) as run:
        assert run.wait(200) == 0, run.stderr
        kept = [run.kept(worker) for worker in range(WORKERS)]
        assert "2 subgroups" in run.stdout + run.stderr, "it has added up in subgroups"
    for worker in kept:
        assert len(worker["refused"]) == 5
        assert all(re.match(r"ResourceSpecError: .*/cluster.yml:1: shard: ", text) for text in worker["refused"]), (
            worker
        )
        for name in kept[0].keys() - {"sizes", "numbers"}:
            np.testing.assert_array_equal(worker[name], kept[0][name], err_msg=name)

    parts = [np.split(worker["numbers"], np.cumsum(worker["sizes"])[:-1]) for worker in kept]
    read = [np.concatenate(step) for step in zip(*parts, strict=True)]
    np.testing.assert_array_equal(np.sort(np.concatenate(read)), np.sort(rows[:, 0]))
    steps = by_hand(rows)
    assert all(set(a) == set(b[:, 0]) for a, b in zip(read, steps, strict=True))
    assert min(kept[2]["sizes"]) == max(kept[2]["sizes"]) == 0 and 0 in kept[1]["sizes"]

    values, losses, evaluated = alone(rows, steps)
    for name, value in values.items():
        np.testing.assert_allclose(kept[0][name], value, rtol=1e-9, atol=1e-12, err_msg=name)
    np.testing.assert_allclose(kept[0]["loss"], losses, rtol=1e-9)
    np.testing.assert_allclose(kept[0]["evaluated"], evaluated, rtol=1e-9)
    w = np.array([[0.1], [0.2], [0.3]])
    for step in steps:
        w -= 0.2 * step[:, 1:4].T @ (step[:, 1:4] @ w - step[:, 4:]) / len(step)
    np.testing.assert_allclose(kept[0]["w"], w, rtol=1e-9)


def records(folder: Path) -> tuple[np.ndarray, list[str]]:
    """Rows of a number, three inputs and a target, and the files in which they are."""
    rng, rows, names = np.random.default_rng(2), [], []
    for number, count in enumerate(COUNTS):
        path = folder / f"part{number}.csv"
        content = np.column_stack([100 * number + np.arange(count), rng.normal(size=(count, 4))])
        path.write_text("".join(",".join(map(repr, row.tolist())) + "\n" for row in content))
        rows.append(content)
        names.append(str(path))
    return np.concatenate(rows), names


def by_hand(rows: np.ndarray) -> list[np.ndarray]:
    """The steps: each worker cuts its batches of 10 into 3, 3, 2 and 2, beginning with another one of these."""
    taken = []
    for worker in range(WORKERS):
        own = np.concatenate([rows[rows[:, 0] // 100 == k] for k in range(worker, len(COUNTS), WORKERS)])
        cuts = np.roll([3, 3, 2, 2], -worker)
        parts = [
            part
            for batch in np.split(own, range(BATCH, len(own), BATCH))
            for part in np.split(batch, np.cumsum(cuts)[:-1])
            if len(part)
        ]
        taken.append(parts)
    most = max(map(len, taken))
    empty = rows[:0]
    return [np.concatenate([parts[k] if k < len(parts) else empty for parts in taken]) for k in range(most)]


def alone(rows: np.ndarray, steps: list[np.ndarray]) -> tuple[dict[str, np.ndarray], list[float], float]:
    """Trains Keras on the same steps on one device."""
    before = keras.config.floatx()
    try:
        model, losses = model_of(), []
        for _ in range(2):
            found = [float(model.train_on_batch(step[:, 1:4], step[:, 4:])) for step in steps]
            losses.append(np.average(found, weights=[len(step) for step in steps]))
            model.reset_metrics()
        evaluated = model.evaluate(rows[:, 1:4], rows[:, 4:], batch_size=BATCH, verbose=0)
    finally:
        keras.config.set_floatx(before)
    values = [*model.variables, *model.optimizer.variables]
    return {f"fit{k}": v.numpy() for k, v in enumerate(values)}, losses, evaluated
