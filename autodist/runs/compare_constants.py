"""Numbers that a script has put into its step, compared between two workers."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from autodist.errors import CaptureMismatchError
from autodist.graph.baked_values import Baked
from autodist.graph.step import Step

log = logging.getLogger("autodist")

_MEND = (
    "The step has to have the same numbers on every worker. From AutoDist(...) on, random and np.random draw alike on "
    "all workers; a generator of its own needs a seed (np.random.default_rng(1), the seed= of a tuner or a study). "
    "What only one worker knows, ad.reduce gives to all: rate = float(ad.reduce(rate if ad.is_chief else 0.0, 'sum'))."
)

_ROUNDING = {"float64": 1e-12, "complex128": 1e-12}
"""By how much machines may compute a number differently; of all other types 1e-6."""


def require_same_values(
    chief: Sequence[Baked],
    mine: Sequence[Baked],
    name: str,
    nodes: Sequence[tuple[str, str]],
    have_own_lengths: bool = False,
    item: Step | None = None,
) -> None:
    """Passes if a step has the same numbers on two workers; warns of arrays that differ.

    Args:
        chief: the values in the chief's step.
        mine: the values in this worker's.
        name: of this worker.
        nodes: name and op of each node of this worker's step.
        have_own_lengths: whether the graphs are made for other numbers of examples; whole numbers may differ then.
        item: the step of this worker; the error shows the line of the script that uses a value.

    Raises:
        CaptureMismatchError: one differs by more than rounding.
    """
    if chief == mine:
        return
    theirs, ours = ({(one.at, one.what): one for one in side} for side in (chief, mine))
    for key in sorted({*theirs, *ours}):
        pair = theirs.get(key), ours.get(key)
        if is_same_value(*pair) or (have_own_lengths and all(map(_is_whole, pair))):
            continue
        node, op = nodes[key[0]]
        told = f"    chief:  {_shown(pair[0])}\n    here:   {_shown(pair[1])}\n{_used_by(item, node, op, key[1])}"
        if all(one is not None and one.shape for one in pair):
            log.warning(
                "%s has another array in its step than the chief:\n%s Each worker trains with its own. That is right "
                "for its part of the data, if all parts have equally many examples; parts of any size are arguments of "
                "the step. Everything else has to be the same on every worker.",
                name, told,
            )  # fmt: skip
            continue
        raise CaptureMismatchError(f"{name} has another number in its step than the chief:\n{told} {_MEND}")


def is_same_value(chief: Baked | None, mine: Baked | None) -> bool:
    """Returns True if two values are equal, or differ by the rounding of different machines."""
    if chief is None or mine is None or chief == mine:
        return chief == mine
    numbers = _number(chief), _number(mine)
    is_alike = (chief.dtype, chief.shape) == (mine.dtype, mine.shape)
    if None in numbers or not is_alike:
        return False
    is_floating = "float" in chief.dtype or not chief.dtype
    return is_floating and math.isclose(*numbers, rel_tol=_ROUNDING.get(chief.dtype, 1e-6))  # type: ignore[arg-type]


def _number(value: Baked) -> float | None:
    try:
        return float(value.text)
    except ValueError:  # an array, a truth value or a complex number
        return None


def _is_whole(value: Baked | None) -> bool:
    """Returns True for what may be a number of examples, in a graph that is made for one number of them."""
    if value is None:
        return False
    number = _number(value)
    return "int" in value.dtype or (number is not None and number == int(number) > 1)


def _shown(value: Baked | None) -> str:
    if value is None:
        return "(nothing)"
    if value.shape is None:
        return value.text
    shape = f" array of shape {value.shape}" if value.shape else ""
    return f"{value.text} ({value.dtype}{shape})"


def _used_by(item: Step | None, node: str, op: str, what: str) -> str:
    """A sentence that names the node with the value, and the first line of the script that depends on it."""
    place = f"{what} of {node} ({op})" if what else f"the constant {node}"
    if item is None:
        return f"It is {place}."
    graph_index, front, seen = item.graph_index, [node], {node}
    while front and not any(map(item.origin_of, front)):
        front = [n for n in dict.fromkeys(c for f in front for c in graph_index.consumers[f]) if n not in seen]
        seen.update(front)
    line = next(filter(None, map(item.origin_of, front)), None)
    readers = ", ".join(graph_index.consumers[node][:2])
    return f"It is {place}{f', which {readers} reads' if readers else ''}{f' ({line} depends on it)' if line else ''}."
