"""Verdicts on Keras's tests, from their outcomes with AutoDist and without."""

from __future__ import annotations

import json
import pathlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from keras_suite.values import Difference


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test.

    Attributes:
        test: its id, below `keras/src`.
        outcome: pytest's "passed", "failed" or "skipped"; "left out" if it is not run, "collected" if it has not begun,
            "started" if the process ended in the test.
        why: the type and text of its failure, or the reason of its skip.
        steps: number of its steps on the replicas, of training and of evaluation.
    """

    test: str
    outcome: str
    why: str = ""
    steps: int = 0

    @property
    def has_passed(self) -> bool:
        """True if the test passed."""
        return self.outcome == "passed"

    @property
    def asks_for_comparison(self) -> bool:
        """True if a run without AutoDist would add information."""
        return bool(self.steps) or self.outcome in ("failed", "started")


def record_outcome(path: pathlib.Path, test: str, outcome: str, why: str = "", steps: int = 0) -> None:
    """Adds the outcome of a test to a file for `read_outcomes`."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "why": why, "steps": steps}) + "\n")


def read_outcomes(path: pathlib.Path) -> dict[str, Outcome]:
    """Returns the outcomes by test; of several of one test a failure takes precedence, and then the last."""
    found: dict[str, Outcome] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        outcome = Outcome(**json.loads(line))
        if outcome.test not in found or found[outcome.test].outcome != "failed":
            found[outcome.test] = outcome
    return found


@dataclass(frozen=True)
class Listed:
    """The reason for a test's difference from one device, and the error with which it is refused."""

    why: str
    error: str = ""


@dataclass(frozen=True)
class Promises:
    """The refused tests, and those whose numbers differ from one device's."""

    refused: Mapping[str, Listed]
    different: Mapping[str, Listed]

    @classmethod
    def read(cls, path: pathlib.Path) -> Promises:
        """Reads a file of tables `refused` (`tests`, `error`, `why`) and `different` (`tests`, `why`).

        Raises:
            ValueError: there are other tables or keys, a reason is missing, or a test is listed twice.
        """
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        if unknown := set(content) - {"refused", "different"}:
            raise ValueError(f"{path.name} has {', '.join(sorted(unknown))}; it may have `refused` and `different`.")
        found = cls(_by_test(content.get("refused", []), "error"), _by_test(content.get("different", [])))
        if twice := set(found.refused) & set(found.different):
            raise ValueError(f"{path.name} lists {', '.join(sorted(twice))} twice.")
        return found

    @property
    def tests(self) -> list[str]:
        """All listed tests."""
        return [*self.refused, *self.different]


def _by_test(tables: Sequence[Mapping[str, Any]], *more: str) -> dict[str, Listed]:
    found: dict[str, Listed] = {}
    for table in tables:
        if set(table) != {"tests", "why", *more} or not all(table.values()):
            raise ValueError(
                f"{dict(table)} has other keys than {', '.join(('tests', 'why', *more))}, or an empty one."
            )
        for test in table["tests"]:
            if test in found:
                raise ValueError(f"{test} is listed twice.")
            found[test] = Listed(table["why"], *(table[key] for key in more))
    return found


class Verdict(Enum):
    """The verdict on a test."""

    PASSED = "passed"
    SKIPPED = "skipped by Keras"
    REFUSED = "refused by promise"
    NOT_OURS = "fail without AutoDist"
    FAILED = "FAILED"
    OTHER_NUMBERS = "HAVE OTHER NUMBERS THAN ON ONE DEVICE"
    WRONGLY_LISTED = "WRONGLY LISTED"

    @property
    def is_wrong(self) -> bool:
        """True if the verdict needs a fix."""
        return self in (Verdict.FAILED, Verdict.OTHER_NUMBERS, Verdict.WRONGLY_LISTED)


@dataclass(frozen=True)
class Said:
    """The verdict on a test, and further remarks."""

    verdict: Verdict
    text: str = ""


def judge(scoped: Outcome, alone: Outcome | None, difference: Difference | None, promises: Promises) -> Said:
    """Returns the verdict on a test.

    Args:
        scoped: its outcome in the scope.
        alone: its outcome without AutoDist; None: it was not run so.
        difference: the difference of its numbers from those without AutoDist; None: not compared.
        promises: the listed tests.
    """
    if scoped.test in promises.refused:
        return _judge_refused(scoped, promises.refused[scoped.test])
    if scoped.asks_for_comparison and (alone is None or alone.outcome == "collected"):
        return Said(Verdict.FAILED, f"{scoped.outcome}, and without AutoDist it has not run; --logs tells more")
    if alone is not None and not alone.has_passed:
        return Said(Verdict.NOT_OURS, alone.why)
    if scoped.outcome == "started":
        return Said(Verdict.FAILED, "the process ended in this test")
    if scoped.outcome == "failed":
        return Said(Verdict.FAILED, scoped.why)
    if scoped.outcome == "collected":
        return Said(Verdict.FAILED, "the process ended before its turn")
    listed = promises.different.get(scoped.test)
    is_other = difference is not None and not difference.is_tolerable
    if listed is not None and not is_other:
        return _wrongly(listed, "gives one device's numbers" if difference is not None else "is not compared")
    if scoped.outcome == "skipped":
        return Said(Verdict.SKIPPED, scoped.why)
    return Said(Verdict.OTHER_NUMBERS, str(difference)) if is_other and listed is None else Said(Verdict.PASSED)


def _judge_refused(scoped: Outcome, listed: Listed) -> Said:
    if scoped.outcome != "failed":
        return _wrongly(listed, f"is not refused ({scoped.outcome})")
    if listed.error not in scoped.why:
        return Said(Verdict.FAILED, f"listed as refused by {listed.error}, and failed with {scoped.why}")
    return Said(Verdict.REFUSED, listed.why)


def _wrongly(listed: Listed, what: str) -> Said:
    return Said(Verdict.WRONGLY_LISTED, f'it {what}, and is listed since "{listed.why}"')
