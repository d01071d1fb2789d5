"""States of the two global random generators that a script shares with its libraries, NumPy's and Python's."""

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
"""Functions that get and set the state of `np.random` and of `random`."""


@dataclass(frozen=True)
class Draws:
    """The state of `np.random` and `random`; reading it is cheap enough for each step.

    Attributes:
        states: the states, by name of the generator.
    """

    states: Mapping[str, Any]

    @classmethod
    def now(cls) -> Self:
        return cls({name: read() for name, (read, _) in _GENERATORS.items()})

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Returns the states from the result of `to_json`."""
        return cls({whose: _from_json(state) for whose, state in content.items()})

    def to_json(self) -> dict[str, Any]:
        """Returns the exact states as a JSON value."""
        return {name: _as_json(state) for name, state in self.states.items()}

    def resume(self, whose: Iterable[str] = tuple(_GENERATORS)) -> str:
        """Sets generators to these states.

        Returns:
            An error message if the script has replaced NumPy's generator by one of another kind; "" on success.
        """
        for one in whose:
            if one in self.states:
                try:
                    _GENERATORS[one][1](self.states[one])
                except ValueError as error:
                    return f"{one}'s generator is of another kind than it was then ({error})"
        return ""

    def unmoved(self) -> list[str]:
        """Returns the names of the generators that have drawn nothing since."""
        now, then = Draws.now().to_json(), self.to_json()
        return [whose for whose in then if json.dumps(now[whose]) == json.dumps(then[whose])]


@functools.cache
def draw_from(content: str) -> None:
    """Sets this process's generators to the chief's states at its AutoDist(...).

    If the script has seeded them before, they have this state already. A second call has no effect, since the script
    has drawn meanwhile.

    Args:
        content: the chief's `Draws.to_json`, as JSON.
    """
    fault = Draws.from_json(json.loads(content)).resume()
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


def _from_json(content: Any) -> Any:
    if isinstance(content, list):
        return [_from_json(one) for one in content]
    if not isinstance(content, Mapping):
        return content
    if content.keys() == {"words", "dtype"}:
        return np.frombuffer(base64.b64decode(content["words"]), content["dtype"])
    return {name: _from_json(one) for name, one in content.items()}
