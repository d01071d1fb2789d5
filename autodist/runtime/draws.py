"""Draws: the states of the two generators that a script shares with all its libraries, NumPy's and Python's."""

from __future__ import annotations

import base64
import functools
import json
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

log = logging.getLogger("autodist")

_GENERATORS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "NumPy": (lambda: np.random.get_state(legacy=False), np.random.set_state),
    "Python": (random.getstate, lambda state: random.setstate((state[0], tuple(map(int, state[1])), state[2]))),
}
"""What gives the state of `np.random` and of `random`, and what sets it."""


@dataclass(frozen=True)
class Draws:
    """What `np.random` and `random` draw next; reading it is cheap, so that it can be noted with each step.

    Attributes:
        states: by name of the generator.
    """

    states: Mapping[str, Any]

    @classmethod
    def now(cls) -> Self:
        return cls({whose: read() for whose, (read, _) in _GENERATORS.items()})

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Self:
        """Those that `told` has given."""
        return cls({whose: _from_json(state) for whose, state in told.items()})

    def told(self) -> dict[str, Any]:
        """As JSON has it, to the last bit."""
        return {whose: _as_json(state) for whose, state in self.states.items()}

    def resume(self, whose: Iterable[str] = tuple(_GENERATORS)) -> str:
        """Lets generators draw what they would have drawn then.

        Returns:
            What is wrong, where the script has put another kind of generator in NumPy's place; "" where nothing is.
        """
        for one in whose:
            if one in self.states:
                try:
                    _GENERATORS[one][1](self.states[one])
                except ValueError as error:
                    return f"{one}'s generator is of another kind than it was then ({error})"
        return ""

    def unmoved(self) -> list[str]:
        """The names of the generators that have drawn nothing since."""
        now, then = Draws.now().told(), self.told()
        return [whose for whose in then if json.dumps(now[whose]) == json.dumps(then[whose])]


@functools.cache
def draw_from(told: str) -> None:
    """Lets this process draw what the chief draws from its AutoDist(...) on.

    Where the script has seeded the generators before that, they have this state already. A second call does nothing:
    the script has drawn since.

    Args:
        told: the chief's `Draws.told`, as JSON.
    """
    fault = Draws.of(json.loads(told)).resume()
    if fault:
        log.warning("the chief's random numbers cannot be drawn here: %s. Seed it on every worker.", fault)


def _as_json(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {name: _as_json(one) for name, one in state.items()}
    if isinstance(state, tuple) and len(state) > 3:  # the words of Python's generator
        state = np.array(state, "<u4")
    if isinstance(state, np.ndarray):
        return {"words": base64.b64encode(state.tobytes()).decode(), "dtype": state.dtype.str}
    if isinstance(state, list | tuple):
        return [_as_json(one) for one in state]
    return state.item() if isinstance(state, np.generic) else state


def _from_json(told: Any) -> Any:
    if isinstance(told, list):
        return [_from_json(one) for one in told]
    if not isinstance(told, Mapping):
        return told
    if told.keys() == {"words", "dtype"}:
        return np.frombuffer(base64.b64decode(told["words"]), told["dtype"])
    return {name: _from_json(one) for name, one in told.items()}
