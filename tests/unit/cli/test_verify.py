"""`autodist verify`: runs that agree and runs that do not, and the comparison of their records."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import pytest
from typer.testing import CliRunner

from autodist.cli import verifying
from autodist.cli.app import app
from autodist.cli.verifying import VerifyResult
from autodist.runs.cli_overrides import CliOverrides
from autodist.verify.recorder import Recorder
from autodist.verify.records import ERROR, NoFloorError, Recording, Rounding, compare
from tests.cluster.runs import MARK
from tests.forked_python.start import ON_CPU, ForkedPython

RUNNER = CliRunner()

HEAD = """
from autodist import AutoDist
import keras
import numpy as np
import tensorflow as tf

rng = np.random.default_rng(1)
x, y = rng.normal(size=(96, 6)), rng.normal(size=(96, 2))
"""

FIT = (
    HEAD
    + """
with AutoDist().scope():
    layers = [keras.layers.Dense(5, activation="tanh"), *LAYERS, keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(keras.optimizers.Adam(0.01), "mse")
model.fit(x, y, batch_size=12, epochs=3, verbose=0)
raise RuntimeError("it was not ended")
"""
)

SESSION = (
    HEAD
    + """
v1 = tf.compat.v1
ad = AutoDist()
with tf.Graph().as_default(), ad.scope():
    features, labels = (v1.placeholder(tf.float32, [12 // ad.num_workers, n]) for n in (6, 2))
    weight = v1.get_variable("weight", [6, 2], initializer=v1.initializers.random_normal())
    loss = tf.reduce_mean(tf.square(tf.tanh(features @ weight) - labels))
    train = v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
    session = ad.create_distributed_session()
    session.run(v1.global_variables_initializer())
    for k in range(3):
        mine = slice(12 * k + ad.worker_index, 12 * k + 12, ad.num_workers)
        session.run([loss, train], {features: x[mine], labels: y[mine]})
"""
)


@pytest.fixture(scope="module")
def forked_python() -> ForkedPython:
    """A forked Python with the seed that the command sets for its processes."""
    return ForkedPython({"PYTHONHASHSEED": "0"})


@pytest.fixture
def forks(forked_python: ForkedPython, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks the processes that the command starts, and the workers on this machine."""

    def run(command: list[str], *, env: dict[str, str], stdout: IO[bytes], **others: Any) -> Any:
        assert others == {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "check": False}
        environment = env | ON_CPU | {MARK: secrets.token_hex(8)}
        with open(os.devnull, "rb") as nothing:
            streams = (nothing, stdout, stdout)
            process = forked_python.start(command[1:], streams, environment, Path.cwd(), chains=1)
        assert process is not None, "its environment is another one"
        return subprocess.CompletedProcess(command, process.wait())

    of_the_system = SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(verifying, "subprocess", of_the_system)


@pytest.fixture(scope="module")
def made_alone() -> dict[tuple[str, int, str], Path]:
    """Folders of the records of runs on one device, by the script's text, the number of steps and the run's name."""
    return {}


@pytest.fixture
def alone_once(
    made_alone: dict[tuple[str, int, str], Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Tests of one script share its runs on one device."""
    run = verifying._Runs.run

    def run_once(runs: verifying._Runs, name: str, overrides: CliOverrides, **others: Any) -> Path:
        if overrides != verifying._ONE_DEVICE:
            return run(runs, name, overrides, **others)
        key = Path(runs.target.words[0]).read_text(encoding="utf-8"), runs.steps, name
        if key not in made_alone:
            made = run(runs, name, overrides, **others)
            made_alone[key] = shutil.copytree(made, tmp_path_factory.mktemp("alone") / name)
        return made_alone[key]

    monkeypatch.setattr(verifying._Runs, "run", run_once)


def write(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


def verify(*words: str) -> Any:
    return RUNNER.invoke(app, ["verify", *words], env={"COLUMNS": "150"})


@pytest.mark.processes
@pytest.mark.usefixtures("forks", "alone_once")
def test_training_that_agrees_is_told_by_variable_slot_and_output_in_float64(tmp_path: Path) -> None:
    script = write(tmp_path, FIT.replace("*LAYERS, ", ""))
    result = verify("--strategy", "PartitionedPS", "--replicas", "2", "--steps", "3", script)
    assert result.exit_code == 0, result.output
    assert "alike: 3 steps on 2 workers of 2 replicas and on one device, in float64" in result.stdout
    rows = [line.split("│")[1:5] for line in result.stdout.splitlines() if line.startswith("│")]
    kinds = [row[0].strip() for row in rows]
    assert (kinds.count("variable"), kinds.count("slot"), kinds.count("output")) == (4, 8, 1)
    assert 0 < max(float(row[2]) for row in rows) < 1e-12


@pytest.mark.processes
@pytest.mark.usefixtures("forks", "alone_once")
def test_a_pipeline_is_held_against_one_device_which_has_no_stages(tmp_path: Path) -> None:
    script, stages = write(tmp_path, FIT.replace("*LAYERS, ", "")), tmp_path / "stages.yml"
    stages.write_text("strategy: {builder: Pipeline, stages: 2, micro_batches: 5, schedule: 1F1B}\n")
    result = verify("--strategy", str(stages), "--steps", "3", script)
    assert result.exit_code == 0, result.output
    assert "alike: 3 steps on 2 pipeline stages with 5 micro-batches and on one device, in float64" in result.stdout
    kinds = [line.split("│")[1].strip() for line in result.stdout.splitlines() if line.startswith("│")]
    assert (kinds.count("variable"), kinds.count("slot"), kinds.count("output")) == (4, 8, 1)


@pytest.mark.processes
@pytest.mark.usefixtures("forks")
def test_training_that_differs_ends_with_status_1_and_the_first_step_and_variable(tmp_path: Path) -> None:
    script = write(tmp_path, FIT.replace("*LAYERS", "keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)"))
    result = verify("--steps", "2", script)
    assert result.exit_code == 1, result.output
    assert "DIFFERENT: 2 steps on 2 workers of 1 replica and on one device, in float64" in result.stdout
    assert "is variable sequential/dense/kernel in step 1" in result.stdout
    assert "draws random numbers" in result.stdout


# A bias of keys has a gradient that is zero but for rounding, which Adam magnifies. The variable `wrong` is what each
# worker but the first adds to its part of the batch.
KEYS = (
    HEAD
    + """
import os
keras.utils.set_random_seed(1)
ad = AutoDist()
with ad.scope():
    inputs = keras.Input((3, 2))
    attended = keras.layers.MultiHeadAttention(1, 2)(inputs, inputs)
    model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(attended)))
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

    @ad.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

x = x.reshape(96, 3, 2)
with open(os.path.join(os.path.dirname(__file__), "wrong")) as file:
    wrong = float(file.read())
for k in range(4):
    mine = slice(12 * k + ad.worker_index, 12 * k + 12, ad.num_workers)
    step(x[mine] + wrong * ad.worker_index, y[mine])
"""
)


@pytest.mark.processes
@pytest.mark.usefixtures("forks", "alone_once")
@pytest.mark.parametrize("wrong", [0.0, 1e-6])
def test_a_bias_of_keys_is_rounding_alone_and_hides_no_fault_of_a_millionth(
    tmp_path: Path, wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong").write_text(str(wrong))
    result = verify("--steps", "4", write(tmp_path, KEYS))
    assert result.exit_code == (1 if wrong else 0), result.output
    lines = [line for line in result.stdout.splitlines() if line.startswith("rounding alone: ")]
    if wrong:
        assert "the first past the limit (1.0e-09) is variable multi_head_attention/query/" in result.stdout
    else:
        assert len(lines) == 3 and all("key" in line and "bias" in line for line in lines), result.stdout
        assert "alike: 4 steps on 2 workers of 1 replica and on one device, in float64" in result.stdout


@pytest.mark.processes
@pytest.mark.usefixtures("forks")
def test_a_difference_of_a_step_that_takes_no_batch_is_told_not_to_be_measured(tmp_path: Path) -> None:
    script = """
ad = AutoDist()
with ad.scope():
    weight = tf.Variable(np.ones((6, 2)))

    @ad.function
    def step(scale):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(scale * (x @ weight) - y))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

step(np.asarray(1.0 + ad.worker_index))
"""
    result = verify("--steps", "2", write(tmp_path, HEAD + script))
    assert result.exit_code == 1, result.output
    told = "It was not measured whether that is rounding alone: the step takes no batches that can be permuted."
    assert told in result.stdout


@pytest.mark.processes
@pytest.mark.usefixtures("forks")
def test_a_script_in_float32_is_held_against_its_rounding_floor(tmp_path: Path) -> None:
    result = verify("--strategy", "PS", "--steps", "9", write(tmp_path, SESSION))
    assert result.exit_code == 0, result.output
    assert "alike: 3 steps on 2 workers" in result.stdout
    assert re.search(r"in the script's own precision, whose rounding floor is [1-9]\.\de-0\d;", result.stdout)


@pytest.mark.processes
@pytest.mark.usefixtures("forks")
def test_a_loss_in_float32_raises_the_limit_of_a_script_in_float64(tmp_path: Path) -> None:
    """No order of the examples shows its rounding: the weight of each is 1/12 on one device, and 1/6 of a half."""
    rounds = "v1.losses.mean_squared_error(labels, tf.tanh(features @ weight), 1 / 3)"
    script = SESSION.replace("tf.reduce_mean(tf.square(tf.tanh(features @ weight) - labels))", rounds)
    script = script.replace("tf.float32", "tf.float64").replace("[6, 2], init", "[6, 2], tf.float64, init")
    result = verify("--strategy", "PS", "--steps", "9", write(tmp_path, script))
    assert result.exit_code == 0, result.output
    assert "in float64 and parts in a lower precision, whose rounding floor is 1.2e-07 at least" in result.stdout


@pytest.mark.processes
@pytest.mark.usefixtures("forks")
def test_a_script_that_fails_is_told_without_a_traceback(tmp_path: Path) -> None:
    result = verify(write(tmp_path, HEAD + "raise ValueError('of its own')\n"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "on one device, the script failed: ValueError: of its own (" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_error_is_noted_with_the_line_of_the_script_and_shown_as_before(tmp_path: Path) -> None:
    script = compile("\n" * 8 + "raise ValueError('of its own')\n", "train.py", "exec")
    with pytest.raises(ValueError) as raised:
        exec(script)  # noqa: S102 (the line above)
    shown: list[Any] = []
    trace = raised.tb.tb_next  # from the script on
    recorder = Recorder(Recording(str(tmp_path), 1, False, True, None))
    recorder._note_error(lambda *about: shown.append(about), ValueError, raised.value, trace)
    assert json.loads((tmp_path / ERROR).read_text(encoding="utf-8")) == "ValueError: of its own (train.py:9)"
    assert shown == [(ValueError, raised.value, trace)]


def record(folder: Path, *steps: dict[str, Any]) -> Path:
    folder.mkdir()
    for position, values in enumerate(steps):
        np.savez(folder / f"{position}.npz", **{name: np.asarray(value, float) for name, value in values.items()})
    return folder


def test_the_first_step_that_is_past_the_limit_is_found_and_the_largest_difference_of_each_value(
    tmp_path: Path,
) -> None:
    one = record(tmp_path / "one", {"variable a": [1, 2], "slot b": 4}, {"variable a": [1, 2], "slot b": 4})
    two = record(tmp_path / "two", {"variable a": [1, 2], "slot b": 4.4}, {"variable a": [1, 3], "slot b": 4.2})
    found = compare(one, two, 0.2)
    assert found.steps == 2
    assert [(d.name, d.at) for d in found.differences] == [("variable a", 2), ("slot b", 1)]
    assert [d.largest for d in found.differences] == pytest.approx([0.5, 0.1])
    assert found.first is not None and (found.first.name, found.first.at) == ("variable a", 2)
    assert compare(one, two, 0.5).first is None
    assert compare(one, two, 0.05).first == found.differences[1]


def test_a_value_that_is_not_finite_on_one_side_exceeds_any_limit(tmp_path: Path) -> None:
    one = record(tmp_path / "one", {"variable a": [1, np.nan], "variable b": np.nan})
    two = record(tmp_path / "two", {"variable a": [1, 2], "variable b": np.nan})
    found = compare(one, two, 1e300)
    assert found.first is not None and found.first.name == "variable a"
    assert [d.largest for d in found.differences] == [np.inf, 0.0]


def test_rows_of_a_part_of_the_batch_are_not_compared_and_named(tmp_path: Path) -> None:
    one = record(tmp_path / "one", {"output rows": [1, 2], "output loss": 1, "output gone": 1})
    two = record(tmp_path / "two", {"output rows": [1], "output loss": 1})
    assert compare(one, two, 0.0).left_out == ("output rows", "output gone")


def test_the_floor_is_the_largest_difference_of_any_variable_in_any_step(tmp_path: Path) -> None:
    one = record(tmp_path / "one", {"variable a": 10, "output rows": [1, 2]}, {"variable a": 10, "output rows": [1, 2]})
    two = record(tmp_path / "two", {"variable a": 11, "output rows": [2, 1]}, {"variable a": 10, "output rows": [2, 1]})
    assert Rounding.of(one, [one, two], within=0.2).floor == pytest.approx(0.1)


THREE = {"variable a": 1, "variable b": 1, "variable k": 1e-18, "slot k": 1e-18, "output loss": 1}


def test_differences_by_permutation_are_rounding_and_do_not_raise_the_floor(tmp_path: Path) -> None:
    one = record(tmp_path / "one", THREE)
    two = record(tmp_path / "two", THREE | {"variable a": 1 + 1e-12, "variable k": 2e-18, "slot k": 3e-18})
    found = Rounding.of(one, [two], within=1e-10)
    assert found.alone == pytest.approx({"variable k": 1.0, "slot k": 2.0})
    assert found.floor == pytest.approx(1e-12, rel=1e-3)
    many = record(tmp_path / "many", THREE | {"variable k": 11e-18, "slot k": 20e-18, "variable b": 1 + 1e-8})
    first = compare(one, many, 1e-9, found.limits).first
    assert first is not None and first.name == "variable b"
    assert compare(one, many, 1e-7, found.limits).first is None
    far = record(tmp_path / "far", THREE | {"variable k": 12e-18})
    first = compare(one, far, 1e-9, found.limits).first
    assert first is not None and first.name == "variable k"


def test_values_that_are_not_finite_are_never_rounding(tmp_path: Path) -> None:
    one = record(tmp_path / "one", THREE | {"variable k": 0})
    found = Rounding.of(one, [record(tmp_path / "two", THREE | {"variable k": 1e-18})], within=1e-10)
    many = record(tmp_path / "many", THREE | {"variable k": np.nan})
    assert compare(one, many, 1e-9, found.limits).first is not None


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"variable k": 2, "output loss": 1.001}, "which changes output loss by 1.0e-03"),
        ({"variable a": 1.001, "variable k": 2}, "which changes 2 of 3 variables"),
    ],
)
def test_a_step_to_which_the_order_matters_has_no_rounding_alone(
    tmp_path: Path, changed: dict[str, float], said: str
) -> None:
    one, two = record(tmp_path / "one", THREE), record(tmp_path / "two", THREE | changed)
    with pytest.raises(NoFloorError, match=said):
        Rounding.of(one, [two], within=1e-10)


def test_parts_in_float32_raise_the_floor_of_a_step_in_float64(tmp_path: Path) -> None:
    one = record(tmp_path / "one", THREE)
    rounded = {"variable a": 1 + 4e-8, "variable b": 1 - 6e-8, "variable k": 2e-18, "output loss": 1 + 1e-7}
    found = Rounding.in_float64(one, [record(tmp_path / "rounded", THREE | rounded)])
    assert (found.floor, found.alone.keys()) == (pytest.approx(6e-8, rel=1e-3), {"variable k"})
    fine = Rounding.in_float64(one, [record(tmp_path / "fine", THREE | {"variable a": 1 + 1e-12})])
    assert fine.floor == pytest.approx(1e-12, rel=1e-3)
    for name, changed in [("loss", {"output loss": 1.001}), ("variables", {"variable a": 1.001, "variable b": 1.001})]:
        with pytest.raises(NoFloorError, match="trains something else"):
            Rounding.in_float64(one, [record(tmp_path / name, THREE | changed)])


def test_the_explanation_of_a_difference_under_a_pipeline_names_micro_batches(tmp_path: Path) -> None:
    one, two = (record(tmp_path / name, {"variable a": value}) for name, value in (("one", 1), ("two", 2)))
    notes = {"draws": ["RandomUniform"], "normalises": ["FusedBatchNormV3"]}
    found = VerifyResult(
        compare(one, two, 0.1), CliOverrides(workers=2), 0.1, "in float64", notes, stages=2, micro_batches=4,
        messages=["loss: it is not known how it depends on the batch"],
    )  # fmt: skip
    told = "\n".join(found.verdict())
    assert "DIFFERENT: 1 steps on 2 pipeline stages with 4 micro-batches and on one device" in told
    assert "each micro-batch draws its own" in told
    assert "In this run, AutoDist has logged: loss: it is not known" in told
    assert "its micro-batch's part of the batch: verify without it." in told
    assert "the parts of all workers make up the batch of one device" in told


def test_a_script_that_comes_to_no_step_is_refused(tmp_path: Path) -> None:
    result = verify(write(tmp_path, "print('no training')\n"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "train.py ended before a training step of an AutoDist" in result.stderr


def test_a_script_that_cannot_be_verified_is_refused_before_it_runs(tmp_path: Path) -> None:
    script = write(tmp_path, "raise SystemExit('it ran')")
    for words, told in [
        ([str(tmp_path / "missing.py")], "does not exist"),
        (["--strategy", "AllReduced", script], "There is no builder named AllReduced"),
        (["--steps", "0", script], "--steps"),
        (["--workers", "0", script], "--workers"),
    ]:
        result = verify(*words)
        assert (result.exit_code, result.stdout) == (2, ""), words
        assert told in result.stderr
