"""Gives Keras initializers that were created without a seed before AutoDist(...) the same seeds on all workers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from autodist.tf_compat.patches import INITIALIZER_SEED, put

_SEED = "seed"
_IS_LATER = "_autodist_is_later"
_LARGEST = int(1e9)  # of Keras's own seeds


def seed_early_initializers(seed: int) -> None:
    """Derives the seeds of existing initializers without a seed from the run's.

    Later initializers draw their seeds from Python's generator, which is the same on all workers by then.
    """
    put(INITIALIZER_SEED, _Seed(seed))


class _Seed:
    """The attribute `seed` of an initializer; that of an early one is drawn at its first read."""

    def __init__(self, seed: int) -> None:
        self._seeds: Iterator[int] = map(random.Random(seed).randint, itertools.repeat(1), itertools.repeat(_LARGEST))

    def __get__(self, one: Any, kind: type[Any] | None = None) -> Any:
        if one is None:
            return self
        held = vars(one)
        if _IS_LATER not in held and _SEED in held and held.get("_init_seed") is None:
            self.__set__(one, next(self._seeds))
        return held[_SEED]

    def __set__(self, one: Any, value: Any) -> None:
        vars(one).update({_SEED: value, _IS_LATER: True})
