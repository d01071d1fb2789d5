"""scripts/keras_tests: its verdicts, and the consistency of its list of promises."""

from __future__ import annotations

import pathlib
import secrets
import subprocess
import textwrap
import types

import keras_suite.__main__ as command
import numpy as np
import pytest
from keras_suite import files
from keras_suite.files import Judged, Options, Run, run_and_judge
from keras_suite.values import Difference, Values, difference
from keras_suite.verdicts import Listed, Outcome, Promises, Verdict, judge, read_outcomes, record_outcome

from tests.cluster.runs import MARK
from tests.forked_python.hosted import HostedPython

NOTHING = Promises({}, {})
REFUSED = Promises({"t": Listed("why", "UnevenBatchError")}, {})
DIFFERENT = Promises({}, {"t": Listed("why")})
ALIKE, OTHERS = Difference(1e-6, "fit 0"), Difference(1e-3, "fit 0")


def outcome(what: str, why: str = "") -> Outcome:
    return Outcome("t", what, why)


@pytest.mark.parametrize(
    "scoped, alone, differing, promises, verdict, text",
    [
        (outcome("passed"), None, None, NOTHING, Verdict.PASSED, ""),
        (outcome("passed"), outcome("passed"), ALIKE, NOTHING, Verdict.PASSED, ""),
        (outcome("passed"), outcome("passed"), OTHERS, NOTHING, Verdict.OTHER_NUMBERS, "fit 0: 1.00e-03"),
        (outcome("skipped", "so"), None, None, NOTHING, Verdict.SKIPPED, "so"),
        (outcome("failed", "A"), outcome("failed", "B"), None, NOTHING, Verdict.NOT_OURS, "B"),
        (outcome("failed", "A"), outcome("passed"), None, NOTHING, Verdict.FAILED, "A"),
        (outcome("started"), outcome("passed"), None, NOTHING, Verdict.FAILED, "the process ended in this test"),
        (outcome("collected"), None, None, NOTHING, Verdict.FAILED, "the process ended before its turn"),
        (Outcome("t", "passed", steps=1), None, None, NOTHING, Verdict.FAILED, "without AutoDist it has not run"),
        (outcome("failed"), outcome("collected"), None, NOTHING, Verdict.FAILED, "without AutoDist it has not run"),
        (outcome("failed", "UnevenBatchError: 5"), None, None, REFUSED, Verdict.REFUSED, "why"),
        (
            outcome("failed", "KeyError: 5"),
            None,
            None,
            REFUSED,
            Verdict.FAILED,
            "listed as refused by UnevenBatchError",
        ),
        (outcome("passed"), None, None, REFUSED, Verdict.WRONGLY_LISTED, "it is not refused (passed)"),
        (outcome("skipped"), None, None, REFUSED, Verdict.WRONGLY_LISTED, "it is not refused (skipped)"),
        (outcome("passed"), outcome("passed"), OTHERS, DIFFERENT, Verdict.PASSED, ""),
        (outcome("passed"), outcome("passed"), ALIKE, DIFFERENT, Verdict.WRONGLY_LISTED, "gives one device's numbers"),
        (outcome("passed"), None, None, DIFFERENT, Verdict.WRONGLY_LISTED, "it is not compared"),
        (outcome("failed", "A"), outcome("passed"), None, DIFFERENT, Verdict.FAILED, "A"),
    ],
)
def test_verdicts(
    scoped: Outcome,
    alone: Outcome | None,
    differing: Difference | None,
    promises: Promises,
    verdict: Verdict,
    text: str,
) -> None:
    said = judge(scoped, alone, differing, promises)
    assert said.verdict is verdict
    assert text in said.text and bool(text) == bool(said.text)


def test_only_what_is_to_be_mended_is_wrong() -> None:
    wrong = {verdict for verdict in Verdict if verdict.is_wrong}
    assert wrong == {Verdict.FAILED, Verdict.OTHER_NUMBERS, Verdict.WRONGLY_LISTED}
    assert all(verdict.value.isupper() == verdict.is_wrong for verdict in Verdict)


def test_a_failure_is_not_forgotten_for_what_is_told_later(tmp_path: pathlib.Path) -> None:
    """A failed subtest is reported before its test, which passes; a test that ends its process has only started."""
    told = [("a", "started"), ("a", "failed"), ("a", "passed"), ("b", "started"), ("b", "passed"), ("c", "started")]
    for test, what in told:
        record_outcome(tmp_path / "told", test, what)
    assert {t: one.outcome for t, one in read_outcomes(tmp_path / "told").items()} == {
        "a": "failed", "b": "passed", "c": "started",
    }  # fmt: skip
    assert read_outcomes(tmp_path / "nothing") == {}


def test_numbers_are_compared_by_the_largest_of_an_array() -> None:
    one = {"fit 0": np.float32([1, 2, 1000]), "fit 1": np.float32([1])}
    alike = difference(one, {**one, "fit 0": np.float32([1.005, 2, 1000])})
    assert alike is not None and alike.is_tolerable and alike.largest == pytest.approx(5e-6, rel=1e-3)
    other = difference(one, {**one, "fit 0": np.float32([1.05, 2, 1000])})
    assert other is not None and not other.is_tolerable and str(other) == "fit 0: 5.00e-05"
    assert difference({"nan": np.array([np.nan, 1])}, {"nan": np.array([np.nan, 1])}) == Difference(0.0, "nan")
    assert difference({"inf": np.array([np.inf, 1])}, {"inf": np.array([np.inf, 1])}) == Difference(0.0, "inf")
    assert difference({}, {}) is None


@pytest.mark.parametrize(
    "one, other, where",
    [
        ({"a": np.array([np.nan, 1])}, {"a": np.array([0.0, 1])}, "a: finite in one run alone"),
        ({"a": np.array([np.inf])}, {"a": np.array([-np.inf])}, "a: finite in one run alone"),
        ({"a": np.zeros(2)}, {"a": np.zeros(3)}, "a: shapes (2,) and (3,)"),
        ({"a": np.zeros(2)}, {}, "one recorded 1 arrays, the other 0"),
    ],
)
def test_numbers_that_cannot_be_subtracted_differ(one: Values, other: Values, where: str) -> None:
    found = difference(one, other)
    assert found is not None and not found.is_tolerable and str(found) == where


def test_the_list_of_promises_can_be_read_and_gives_reasons() -> None:
    promises = Promises.read(command.PROMISES)
    root = command.keras_sources()
    for test, listed in {**promises.refused, **promises.different}.items():
        file, _, name = test.partition("::")
        assert (root / file).is_file(), test
        assert name and listed.why, test


@pytest.mark.parametrize(
    "text, told",
    [
        ("[[passed]]\ntests = ['a']\nwhy = 'b'", "passed"),
        ("[[refused]]\ntests = ['a']\nwhy = 'b'", "error"),
        ("[[different]]\ntests = ['a']\nwhy = ''", "why"),
        ("[[different]]\ntests = ['a', 'a']\nwhy = 'b'", "a is listed twice"),
        ("[[different]]\ntests = ['a']\nwhy = 'b'\n[[refused]]\ntests = ['a']\nwhy = 'b'\nerror = 'c'", "a twice"),
    ],
)
def test_a_list_without_reasons_or_with_a_test_twice_is_refused(tmp_path: pathlib.Path, text: str, told: str) -> None:
    (tmp_path / "list.toml").write_text(text)
    with pytest.raises(ValueError, match=told):
        Promises.read(tmp_path / "list.toml")


def test_files_are_found_by_folder_and_by_name_once(tmp_path: pathlib.Path) -> None:
    (tmp_path / "layers" / "rnn").mkdir(parents=True)
    for name in ("layers/rnn/lstm_test.py", "layers/rnn/lstm.py", "layers/layer_test.py"):
        (tmp_path / name).touch()
    (tmp_path / "layers" / "rnn" / "gru_test.py").touch()
    found = command.find_files(tmp_path, ["layers/rnn/lstm_test.py", "layers/layer_test.py", "layers"])
    assert list(found) == ["layers/rnn/lstm_test.py", "layers/rnn/gru_test.py", "layers/layer_test.py"]
    assert list(command.find_files(tmp_path, ["layers"], ["layers/rnn"])) == ["layers/layer_test.py"]
    with pytest.raises(FileNotFoundError, match="optimizers is neither a file"):
        list(command.find_files(tmp_path, ["optimizers"]))


def test_the_installed_keras_has_its_tests() -> None:
    assert len(list(command.find_files(command.keras_sources(), command.FOLDERS))) > 50


TINY = """
    import os, signal, sys, unittest, keras, numpy as np

    class Tiny(unittest.TestCase):
        def train(self, *layers):
            model = keras.Sequential([*layers, keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            model.fit(np.arange(12.0).reshape(6, 2), np.arange(6.0), batch_size=6, verbose=0)

        def test_fit(self): self.train()
        def test_parts(self): self.train(keras.layers.BatchNormalization())
        def test_known_parts(self): self.train(keras.layers.BatchNormalization())
        def test_skip(self): keras.Model.fit, self.skipTest("so it is")
        def test_broken(self): keras.Model.fit, {}["for everyone"]
        def test_dies(self): keras.Model.fit, "0" in sys.argv or os.kill(os.getpid(), signal.SIGKILL)
        def test_without_training(self): pass
        def test_fixed(self): self.train(keras.layers.Reshape((2,)), keras.layers.Lambda(fixed))

    def fixed(x):
        return keras.ops.reshape(x, (6, 2))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_files_are_run_in_the_scope_and_compared_with_one_device(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the layers' tests, only those that train run. After a test that ends the process, the rest run in another.

    The processes, which are four, are forked from one that has imported TensorFlow.
    """
    monkeypatch.setenv(MARK, secrets.token_hex(8))
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "tiny_test.py").write_text(textwrap.dedent(TINY))
    (tmp_path / "layers" / "empty_test.py").write_text("")
    ids = "layers/tiny_test.py::Tiny::test_"
    promises = Promises(
        {f"{ids}fixed": Listed("one length alone", "CaptureError")},
        {f"{ids}known_parts": Listed("parts"), f"{ids}gone": Listed("it was there once")},
    )
    with HostedPython(tmp_path / "python") as python:
        monkeypatch.setattr(files, "sys", types.SimpleNamespace(executable=str(python.folder / "bin" / "python")))
        tested = run_and_judge(tmp_path, ["layers/tiny_test.py", "layers/empty_test.py"], Options(limit=300), promises)
    assert {test.removeprefix(ids): (one.verdict.name, one.steps) for test, one in tested.items()} == {
        "fit": ("PASSED", 1),
        "parts": ("OTHER_NUMBERS", 1),
        "known_parts": ("PASSED", 1),
        "skip": ("SKIPPED", 0),
        "broken": ("NOT_OURS", 0),
        "dies": ("FAILED", 0),
        "fixed": ("REFUSED", 0),
        "gone": ("WRONGLY_LISTED", 0),
        "layers/empty_test.py": ("FAILED", 0),
    }
    assert "so it is" in tested[f"{ids}skip"].text and "for everyone" in tested[f"{ids}broken"].text
    assert "the process ended in this test" in tested[f"{ids}dies"].text
    differences = {name: tested[f"{ids}{name}"].difference for name in ("fit", "parts", "broken")}
    assert differences["fit"] is not None and differences["fit"].is_tolerable
    assert differences["parts"] is not None and not differences["parts"].is_tolerable
    assert differences["broken"] is None


@pytest.mark.processes
def test_what_takes_too_long_is_ended_with_all_that_it_started(tmp_path: pathlib.Path) -> None:
    """It ends before a test does, by a limit that importing pytest alone takes longer than."""
    (tmp_path / "slow_test.py").write_text("def test_slow(): pass")
    tested = run_and_judge(tmp_path, ["slow_test.py"], Options(limit=0.01), NOTHING)
    why = "no test is found in it in 0.01 s (--limit); --logs tells more"
    assert tested == {"slow_test.py": Judged(Verdict.FAILED, why)}


@pytest.mark.processes
def test_a_test_that_takes_too_long_has_failed(tmp_path: pathlib.Path) -> None:
    record_outcome(tmp_path / "outcomes", "passed", "passed")
    record_outcome(tmp_path / "outcomes", "hangs", "started")
    run = Run(tmp_path, tmp_path, Options(limit=0.01))
    with subprocess.Popen(["sleep", "60"]) as process:
        run.wait(process)
        process.kill()
    assert run.outcomes()["hangs"].why == "it took more than 0.01 s (--limit) and was ended"
    assert run.outcomes()["passed"].has_passed
