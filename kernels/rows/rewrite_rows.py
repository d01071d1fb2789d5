"""RewriteRows: applies the rules for rows until none of them matches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from autodist.graph.step import CapturedStep
from autodist.kernels.base import Kernel
from autodist.kernels.rows.divide_rows import DivideRows
from autodist.kernels.rows.gather_before_arithmetic import GatherBeforeArithmetic
from autodist.kernels.rows.gather_rows import GatherRows
from autodist.kernels.rows.scatter_rows import ScatterRows
from autodist.kernels.rows.sum_rows import SumRows
from autodist.kernels.rule import Rule
from autodist.kernels.until_stable import UntilStable

# Divisions of rows are simplified, and added tables become rows, before gathers move past the remaining arithmetic and
# then to variables.
RULES: tuple[Rule, ...] = (DivideRows(), ScatterRows(), SumRows(), GatherBeforeArithmetic(), GatherRows())


@dataclass(frozen=True)
class RewriteRows(UntilStable):
    """Replaces operations on whole tables by operations on rows."""

    rules: tuple[Kernel[CapturedStep, CapturedStep], ...] = RULES
    name: ClassVar[str] = "rewrite-rows"
    after: ClassVar[Mapping[str, str]] = {
        "reduce-before-postprocessing": "it decides which tensors are gradients, before paths to them are traversed",
    }
