"""Keras initializers without a seed that were made before AutoDist(...): all workers draw alike from them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from keras.src.initializers.random_initializers import RandomInitializer  # which draws the seed that it is not given

_SEED = "seed"
_IS_LATER = "_autodist_is_later"
_LARGEST = int(1e9)  # of Keras's own seeds


def seed_early_initializers(seed: int) -> None:
    """Gives initializers that have no seed, and are there by now, seeds that follow from the run's.

    Those that are made later draw their seeds from Python's generator, which is the same on all workers by then.

    Args:
        seed: of the run.
    """
    RandomInitializer.seed = _Seed(seed)


class _Seed:
    """The attribute `seed` of an initializer; an early one gets its value where it is first read.

    Args:
        seed: of the run.
    """

    def __init__(self, seed: int) -> None:
        self._given: Iterator[int] = map(random.Random(seed).randint, itertools.repeat(1), itertools.repeat(_LARGEST))

    def __get__(self, one: Any, kind: type[Any] | None = None) -> Any:
        if one is None:
            return self
        held = vars(one)
        if _IS_LATER not in held and _SEED in held and held.get("_init_seed") is None:
            self.__set__(one, next(self._given))
        return held[_SEED]

    def __set__(self, one: Any, value: Any) -> None:
        vars(one).update({_SEED: value, _IS_LATER: True})
