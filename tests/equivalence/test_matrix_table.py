"""The table of trained combinations covers every pair of values, and mentions only programs that are trained."""

from __future__ import annotations

from tests.equivalence import test_besides
from tests.equivalence.matrix import AXES, all_pairs, choose, covered, pairs_of
from tests.equivalence.test_matrix import CASES


def test_every_pair_of_values_meets() -> None:
    assert covered(choose()) == all_pairs()
    assert len(all_pairs()) == 27 * 4 + 9 * 6  # strategies with four axes of three, and those axes with one another


def test_every_chosen_combination_is_trained() -> None:
    assert [case.combination for case in CASES] == choose()
    assert len(CASES) == len(set(CASES)) >= len(AXES["strategy"]) * len(AXES["shape"])


def test_a_combination_holds_one_pair_for_every_two_axes() -> None:
    assert len(pairs_of(("ps", "graph", "1x2", "mlp", "adam"))) == 10
    assert (("strategy", "ps"), ("model", "mlp")) in pairs_of(("ps", "graph", "1x2", "mlp", "adam"))


def test_features_are_told_of_programs_that_are_trained() -> None:
    trained = {case.values[1] for case in test_besides.CASES}
    assert test_besides.FEATURES.keys() <= trained
