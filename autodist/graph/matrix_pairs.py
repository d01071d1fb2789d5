"""Matrix pairs: the matrices that the places of a mesh can divide, the first by columns and the next by rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autodist.graph.matrix_runs import Divided, Run, find_runs
from autodist.graph.step import CapturedStep

BETTER = 2
"""A run is preferred to those before it if it has this many times as many parameters for each element that it sums."""


@dataclass(frozen=True)
class MatrixPairs:
    """The result of `find_pairs`.

    Attributes:
        divided: the variables to divide, by name, in the order of the step's variables.
        whole: the other matrices and tables, by name, with the reason.
    """

    divided: dict[str, Divided]
    whole: dict[str, str]


def find_pairs(step: CapturedStep, parts: int, decided: Collection[str] = ()) -> MatrixPairs:
    """Finds matrices in a chain, of which the first is divided by columns and the second by rows.

    The chains are the runs of the forward pass. If two runs meet in a tensor, the first one is divided, unless the
    other has at least `BETTER` times as many parameters for each element that it sums. The rows of a table that an
    input of the step indexes are divided, too.

    Source: M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
    2019.

    Args:
        step: the step.
        parts: the number of parts.
        decided: names of variables with a layout of their own; the chains that they belong to stay whole.
    """
    runs = find_runs(step)
    reasons: dict[Run, str] = {run: run.obstacle for run in runs if run.obstacle}
    faults = {run: _fault(run, parts, decided) for run in runs if run.tables or (run.columns and run.rows)}
    reasons |= {run: fault for run, fault in faults.items() if fault is not None}
    possible = [run for run, fault in faults.items() if fault is None]
    chosen = _chosen(possible)
    reasons |= dict.fromkeys(set(possible).difference(chosen), "a matrix next to it is divided")
    divided = {name: one for run in chosen for name, one in run.uses().items()}
    matrices = {name for run in runs for name in (*run.columns, *run.rows)}.difference(divided, decided)
    whole = {name: _reason(name, runs, reasons) for name in matrices}
    order = {variable.name: position for position, variable in enumerate(step.variables)}
    return MatrixPairs(
        {name: divided[name] for name in sorted(divided, key=order.__getitem__)},
        {name: whole[name] for name in sorted(whole, key=order.__getitem__)},
    )


def _chosen(runs: Sequence[Run]) -> list[Run]:
    """Returns runs of which no two meet, and to which no other can be added: first those with tables."""
    found: list[Run] = []
    tables = [run for run in runs if run.tables]
    first = [
        run for run in runs
        if not any(run.meets(other) and _worth(other) >= BETTER * _worth(run) for other in runs)
    ]  # fmt: skip
    for run in (*tables, *first, *runs):
        if run not in found and not any(run.meets(other) for other in found):
            found.append(run)
    return found


def _worth(run: Run) -> float:
    """Returns the number of parameters for each element that is summed."""
    return run.parameters / max(run.summed, 1)


def _fault(run: Run, parts: int, decided: Collection[str]) -> str | None:
    """Returns the reason why a run cannot be divided; None if it can. The rows of a table may have obstacles."""
    if run.obstacle and not run.tables:
        return run.obstacle
    if None in run.lengths:
        return "its length is that of the batch"
    rest = [length for length in run.lengths if length is not None and length % parts]
    if rest:
        return f"{min(rest)} is not divisible by {parts}"
    other = next((name for name in run.uses() if name in decided), None)
    return other and f"{other} has a layout"


def _reason(name: str, runs: Collection[Run], reasons: dict[Run, str]) -> str:
    """Returns the reason why a matrix stays whole: that of a run without obstacles, else of its columns."""
    own = [run for run in runs if name in run.columns or name in run.rows]
    own.sort(key=lambda run: (run.obstacle is not None and not run.tables, name not in run.columns))
    return next((reasons[run] for run in own if run in reasons), "no matrix is next to it in a chain")
