"""The trained combinations: every pair of values of the five axes occurs at least once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

AXES: Mapping[str, Sequence[str]] = {
    "strategy": (
        *("shuffle", "ring", "ps", "ps_load_balancing", "parallax"),
        *("partitioned_ps", "random_axis_ar", "sharded", "fsdp"),
    ),
    "front": ("graph", "function", "keras"),
    "shape": ("1x2", "2x1", "2x2"),
    "model": ("mlp", "convolution", "embedding"),
    "optimizer": ("momentum", "adam", "adagrad"),
}

Combination = tuple[str, ...]
Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs_of(combination: Combination) -> set[Pair]:
    """Returns every two axes with their values in one combination."""
    return set(itertools.combinations(zip(AXES, combination, strict=True), 2))


def all_pairs() -> set[Pair]:
    return {pair for combination in itertools.product(*AXES.values()) for pair in pairs_of(combination)}


def choose() -> list[Combination]:
    """Returns combinations that contain all pairs: greedily those with most missing pairs, the first of equals."""
    missing = all_pairs()
    candidates = list(itertools.product(*AXES.values()))
    chosen = []
    while missing:
        best = max(candidates, key=lambda candidate: len(pairs_of(candidate) & missing))
        missing -= pairs_of(best)
        chosen.append(best)
    return sorted(chosen, key=_positions)


def _positions(combination: Combination) -> list[int]:
    return [values.index(value) for values, value in zip(AXES.values(), combination, strict=True)]


def covered(combinations: Iterable[Combination]) -> set[Pair]:
    return {pair for combination in combinations for pair in pairs_of(combination)}
