"""scripts/keras_tests: what it says of a test, and that its list of promises stays true."""

from __future__ import annotations

import pathlib
import textwrap

import keras_suite.__main__ as command
import numpy as np
import pytest
from keras_suite.files import Judged, Options, run_and_judge
from keras_suite.values import difference
from keras_suite.verdicts import Listed, Outcome, Promises, Verdict, judge, read_outcomes

NOTHING = Promises({}, {})
REFUSED = Promises({"t": Listed("why", "UnevenBatchError")}, {})
DIFFERENT = Promises({}, {"t": Listed("why")})


def outcome(what: str, why: str = "") -> Outcome:
    return Outcome("t", what, why)


@pytest.mark.parametrize(
    "scoped, alone, differing, promises, verdict, text",
    [
        (outcome("passed"), None, None, NOTHING, Verdict.PASSED, ""),
        (outcome("passed"), outcome("passed"), "", NOTHING, Verdict.PASSED, ""),
        (outcome("passed"), outcome("passed"), "so much", NOTHING, Verdict.OTHER_NUMBERS, "so much"),
        (outcome("skipped", "so"), None, None, NOTHING, Verdict.SKIPPED, "so"),
        (outcome("failed", "A"), outcome("failed", "B"), None, NOTHING, Verdict.NOT_OURS, "B"),
        (outcome("failed", "A"), outcome("passed"), None, NOTHING, Verdict.FAILED, "A"),
        (outcome("started"), outcome("passed"), None, NOTHING, Verdict.FAILED, "the process ended in this test"),
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
        (outcome("passed"), outcome("passed"), "so much", DIFFERENT, Verdict.PASSED, ""),
        (outcome("passed"), outcome("passed"), "", DIFFERENT, Verdict.WRONGLY_LISTED, "gives one device's numbers"),
        (outcome("passed"), None, None, DIFFERENT, Verdict.WRONGLY_LISTED, "it is not compared"),
        (outcome("failed", "A"), outcome("passed"), None, DIFFERENT, Verdict.FAILED, "A"),
    ],
)
def test_verdicts(
    scoped: Outcome, alone: Outcome | None, differing: str | None, promises: Promises, verdict: Verdict, text: str
) -> None:
    said = judge(scoped, alone, differing, promises)
    assert said.verdict is verdict
    assert text in said.text and bool(text) == bool(said.text)


def test_only_what_is_to_be_mended_is_wrong() -> None:
    wrong = {verdict for verdict in Verdict if verdict.is_wrong}
    assert wrong == {Verdict.FAILED, Verdict.OTHER_NUMBERS, Verdict.WRONGLY_LISTED}
    assert all(verdict.value.isupper() == verdict.is_wrong for verdict in Verdict)


def test_a_failure_is_not_forgotten_for_what_is_told_later(tmp_path: pathlib.Path) -> None:
    """A failed subtest is told before the test, which passes; what its process does not survive has only started."""
    told = [("a", "started"), ("a", "failed"), ("a", "passed"), ("b", "started"), ("b", "passed"), ("c", "started")]
    (tmp_path / "told").write_text("".join(f'{{"test": "{t}", "outcome": "{o}"}}\n' for t, o in told))
    assert {t: one.outcome for t, one in read_outcomes(tmp_path / "told").items()} == {
        "a": "failed", "b": "passed", "c": "started",
    }  # fmt: skip
    assert read_outcomes(tmp_path / "nothing") == {}


def test_numbers_are_compared_by_the_largest_of_an_array() -> None:
    one = {"fit 0": np.float32([1, 2, 1000])}
    assert difference(one, {"fit 0": np.float32([1.005, 2, 1000])}) == ""
    assert difference(one, {"fit 0": np.float32([1.05, 2, 1000])}).startswith("fit 0: 5.00e-02 of 1.00e+03")
    assert difference({"nan": np.array([np.nan, 1])}, {"nan": np.array([np.nan, 1])}) == ""
    assert difference({"nan": np.array([np.nan, 1])}, {"nan": np.array([0.0, 1])}) != ""
    assert "shapes (2,) and (3,)" in difference({"a": np.zeros(2)}, {"a": np.zeros(3)})
    assert difference({"a": np.zeros(2)}, {}) == "one recorded 1 arrays, the other 0"


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
    found = command.find_files(tmp_path, ["layers/rnn", "layers/layer_test.py", "layers"])
    assert list(found) == ["layers/rnn/lstm_test.py", "layers/layer_test.py"]
    with pytest.raises(FileNotFoundError, match="optimizers is no file"):
        list(command.find_files(tmp_path, ["optimizers"]))


def test_the_installed_keras_has_its_tests() -> None:
    assert len(list(command.find_files(command.keras_sources(), command.FOLDERS))) > 50


TINY = """
    import unittest, keras, numpy as np

    class Tiny(unittest.TestCase):
        def fit(self, *layers):
            model = keras.Sequential([*layers, keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            model.fit(np.arange(12.0).reshape(6, 2), np.arange(6.0), batch_size=6, verbose=0)

        def test_fit(self): self.fit()
        def test_parts(self): self.fit(keras.layers.BatchNormalization())
        def test_known_parts(self): self.fit(keras.layers.BatchNormalization())
        def test_skip(self): self.skipTest("so it is")
        def test_broken(self): raise KeyError("for everyone")
        def test_fixed(self): self.fit(keras.layers.Reshape((2,)), keras.layers.Lambda(fixed))

    def fixed(x):
        return keras.ops.reshape(x, (6, 2))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_file_is_run_in_the_scope_and_compared_with_one_device(tmp_path: pathlib.Path) -> None:
    (tmp_path / "tiny_test.py").write_text(textwrap.dedent(TINY))
    ids = "tiny_test.py::Tiny::test_"
    promises = Promises(
        {f"{ids}fixed": Listed("one length alone", "CaptureError")},
        {f"{ids}known_parts": Listed("parts"), f"{ids}gone": Listed("it was there once")},
    )
    tested = run_and_judge(tmp_path, "tiny_test.py", Options(limit=300), promises)
    assert {test.removeprefix(ids): (one.verdict.name, one.steps) for test, one in tested.items()} == {
        "fit": ("PASSED", 1),
        "parts": ("OTHER_NUMBERS", 1),
        "known_parts": ("PASSED", 1),
        "skip": ("SKIPPED", 0),
        "broken": ("NOT_OURS", 0),
        "fixed": ("REFUSED", 0),
        "gone": ("WRONGLY_LISTED", 0),
    }
    assert "so it is" in tested[f"{ids}skip"].text and "for everyone" in tested[f"{ids}broken"].text


@pytest.mark.processes
def test_what_takes_too_long_is_ended_with_all_that_it_started(tmp_path: pathlib.Path) -> None:
    """It ends before a test does, by a limit that importing pytest alone takes longer than."""
    (tmp_path / "slow_test.py").write_text("def test_slow(): pass")
    tested = run_and_judge(tmp_path, "slow_test.py", Options(limit=0.01), NOTHING)
    assert tested == {"slow_test.py": Judged(Verdict.FAILED, "it took more than 0.01 s (--limit) and was ended")}
