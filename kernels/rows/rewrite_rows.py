"""RewriteRows: applies the rules for rows until none of them matches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle, islice
from typing import ClassVar

from autodist.errors import RewriteError
from autodist.graph.step import Step
from autodist.kernels.base import Context, Kernel, run_pipeline
from autodist.kernels.rows.divide_rows import DivideRows
from autodist.kernels.rows.gather_before_arithmetic import GatherBeforeArithmetic
from autodist.kernels.rows.gather_rows import GatherRows
from autodist.kernels.rows.rule import RowRule
from autodist.kernels.rows.scatter_rows import ScatterRows
from autodist.kernels.rows.sum_rows import SumRows

# Divisions of rows are simplified, and added tables become rows, before gathers move past the remaining arithmetic and
# then to variables.
RULES: tuple[RowRule, ...] = (DivideRows(), ScatterRows(), SumRows(), GatherBeforeArithmetic(), GatherRows())

_MOST_ROUNDS = 10


@dataclass(frozen=True)
class RewriteRows(Kernel):
    """Replaces operations on whole tables by operations on rows; repeats the rules until none changes the step.

    Attributes:
        rules: in the order in which they are applied.
    """

    rules: tuple[Kernel, ...] = RULES
    name: ClassVar[str] = "rewrite-rows"

    def apply(self, step: Step, context: Context) -> Step:
        changing: list[str] = []
        quiet = 0
        for rule in islice(cycle(self.rules), _MOST_ROUNDS * len(self.rules)):
            before, step = step, run_pipeline([rule], step, context)
            quiet = quiet + 1 if step is before else 0
            changing += [] if quiet else [rule.name]
            if quiet == len(self.rules):
                return step
        raise RewriteError(
            f"the rules {changing[-2]} and {changing[-1]} still change the step after {_MOST_ROUNDS} rounds: each "
            "undoes the other's rewrite; make one of them refuse it"
        )
