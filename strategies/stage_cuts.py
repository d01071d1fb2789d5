"""Where a row of layers is cut into pipeline stages."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence


def balanced_cuts(work: Sequence[int], sizes: Sequence[int], count: int) -> list[int]:
    """Where `count` runs of layers begin, and where the last one ends, so that the largest run is as small as can be.

    The largest work counts first, and among all cuts that have the least of it, the largest size. Found by halving, for
    each of the two, what a run may have at most: layers fill run after run, which shows whether there are runs enough.

    Args:
        work: of each layer.
        sizes: of each layer.
        count: of runs, none of which is empty; at most as many as there are layers.
    """
    most_work = _least(work, lambda most: _filled(work, sizes, most, sum(sizes), count) is not None)
    most_size = _least(sizes, lambda most: _filled(work, sizes, most_work, most, count) is not None)
    cuts = _filled(work, sizes, most_work, most_size, count)
    assert cuts is not None, "it has been tried"
    return cuts


def _least(of_layers: Sequence[int], is_enough: Callable[[int], bool]) -> int:
    """The least that is enough for a run, which one layer has, or several together."""
    return bisect.bisect_left(range(sum(of_layers)), True, key=is_enough)


def _filled(work: Sequence[int], sizes: Sequence[int], most_work: int, most_size: int, count: int) -> list[int] | None:
    """Cuts into runs that have no more than that; None: there are none."""
    cuts, own_work, own_size = [0], 0, 0
    for position, (more_work, more_size) in enumerate(zip(work, sizes, strict=True)):
        own_work, own_size = own_work + more_work, own_size + more_size
        are_left = len(work) - position == count - len(cuts)  # each of the last layers is a run
        if position and (are_left or own_work > most_work or own_size > most_size):
            cuts.append(position)
            own_work, own_size = more_work, more_size
        if len(cuts) > count or own_work > most_work or own_size > most_size:
            return None
    return [*cuts, len(work)]
