"""scripts/features.py: the page's table of features matches the tests' marks, and wrong marks are rejected."""

from __future__ import annotations

import ast
import builtins
import subprocess
import sys

import pytest

from autodist import errors
from tests.loaded_scripts import ROOT, load_script

SCRIPT = ROOT / "scripts" / "features.py"

features = load_script("features")
MARKS = features.all_marks()


def test_the_page_has_the_table_of_the_marks() -> None:
    text = features.PAGE.read_text()
    assert features.with_table(text, features.table_of(mark for mark, _ in MARKS)) == text, (
        "python scripts/features.py writes it"
    )


def test_every_front_end_has_features_and_refuses_some() -> None:
    for front in features.FRONTS:
        assert {bool(mark.refused) for mark, _ in MARKS if mark.front == front} == {True, False}


@pytest.mark.parametrize(
    ("refused", "place", "test"),
    [pytest.param(mark.refused, mark.place, test, id=mark.place) for mark, test in MARKS if mark.refused],
)
def test_an_error_that_is_told_exists_and_the_test_asks_for_it(refused: str, place: str, test: ast.stmt) -> None:
    error = getattr(errors, refused, None) or getattr(builtins, refused, None)
    assert isinstance(error, type) and issubclass(error, Exception), f"{place}: there is no {refused}"
    assert isinstance(test, ast.FunctionDef), f"{place}: a refusal is a mark of the test that asks for it"
    said = [ast.unparse(statement) for statement in test.body]
    assert any(refused in line for line in said), f"{place}: the test does not ask for {refused}"


MARKED = '''
CASES = [pytest.param(1, marks=pytest.mark.feature("fit", "data: lists"))]

@pytest.mark.slow
@pytest.mark.feature("session", "data: Lists of `lists`", refused="CaptureError")
def test_it(): ...

def helper():
    """Not pytest.mark.feature("function", "data: lists")."""
'''


def test_marks_are_found_at_tests_and_in_cases() -> None:
    found = [(mark.front, mark.feature, mark.refused, mark.place) for mark, _ in features.marks_in(MARKED, "test_x.py")]
    assert found == [
        ("fit", "data: lists", None, "test_x.py:2"),
        ("session", "data: Lists of `lists`", "CaptureError", "test_x.py:5"),
    ]


def test_rows_stand_in_their_groups_and_in_order() -> None:
    marks = [
        features.Mark("fit", "values: `b`"),
        features.Mark("function", "values: a"),
        features.Mark("session", "values: a", "CaptureError"),
        features.Mark("session", "data: z"),
        features.Mark("session", "data: z"),
    ]
    assert features.table_of(marks).splitlines() == [
        "| | | `fit` | `@ad.function` | session |",
        "|---|---|---|---|---|",
        "| data | z | – | – | yes |",
        "| values | a | – | yes | `CaptureError` |",
        "|  | `b` | yes | – | – |",
    ]


@pytest.mark.parametrize(("first", "second"), [(None, "CaptureError"), ("RewriteError", "CaptureError")])
def test_a_front_end_does_one_thing_with_a_feature(first: str | None, second: str) -> None:
    marks = [features.Mark("fit", "data: z", first, "a:1"), features.Mark("fit", "data: z", second, "b:2")]
    with pytest.raises(ValueError, match="data: z, fit: .* at a:1, `CaptureError` at b:2"):
        features.table_of(marks)


@pytest.mark.parametrize(
    ("mark", "told"),
    [(("keras", "data: z"), "'keras' is not a front end"), (("fit", "z"), "'z' is not 'group: name'")],
)
def test_what_the_table_has_no_place_for_is_told(mark: tuple[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        features.Mark(*mark)


def test_a_readme_without_a_place_for_it_is_told() -> None:
    with pytest.raises(ValueError, match="needs the lines"):
        features.with_table("# AutoDist\n", "")


def test_tensorflow_is_not_imported() -> None:
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(SCRIPT)], timeout=60, check=False).returncode == 0
