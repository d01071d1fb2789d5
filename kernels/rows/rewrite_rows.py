"""RewriteRows: applies the rules for rows until none of them matches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from typing import ClassVar

from autodist.errors import RewriteError
from autodist.graph.step import CapturedStep
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
class RewriteRows(Kernel[CapturedStep, CapturedStep]):
    """Replaces operations on whole tables by operations on rows; repeats the rules until none changes the step.

    Attributes:
        rules: in the order in which they are applied.
    """

    rules: tuple[Kernel[CapturedStep, CapturedStep], ...] = RULES
    name: ClassVar[str] = "rewrite-rows"
    after: ClassVar[Mapping[str, str]] = {
        "reduce-before-postprocessing": "it decides which tensors are gradients, before paths to them are traversed",
    }

    def apply(self, step: CapturedStep, context: Context) -> CapturedStep:
        changing: list[str] = []
        quiet = 0
        for rule in islice(cycle(self.rules), _MOST_ROUNDS * len(self.rules)):
            made = run_pipeline([rule], step, context)
            assert isinstance(made, CapturedStep), "rules keep the phase"
            quiet = quiet + 1 if made is step else 0
            step = made
            changing += [] if quiet else [rule.name]
            if quiet == len(self.rules):
                return step
        raise RewriteError(
            f"the rules {changing[-2]} and {changing[-1]} still change the step after {_MOST_ROUNDS} rounds: each "
            "undoes the other's rewrite; make one of them refuse it"
        )
