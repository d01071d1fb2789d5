"""UntilStable: applies rules one after the other until none of them changes the step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle, islice
from typing import ClassVar

from autodist.errors import RewriteError
from autodist.graph.step import CapturedStep
from autodist.kernels.base import Context, Kernel, run_pipeline
from autodist.kernels.registry import registered_rules

_MOST_ROUNDS = 10


@dataclass(frozen=True)
class UntilStable(Kernel[CapturedStep, CapturedStep]):
    """Applies rules in turn until none changes the step. A rule is a kernel, most simply a `Rule`.

    The name of such a kernel is the name of its group. `register_rule` adds rules of a script to a group.

    Attributes:
        rules: in the order in which they are applied; those of scripts follow.
    """

    rules: tuple[Kernel[CapturedStep, CapturedStep], ...]
    name: ClassVar[str] = "until-stable"

    def apply(self, step: CapturedStep, context: Context) -> CapturedStep:
        rules = (*self.rules, *registered_rules(self.name))
        changing: list[str] = []
        quiet = 0
        for rule in islice(cycle(rules), _MOST_ROUNDS * len(rules)):
            made = run_pipeline([rule], step, context)
            assert isinstance(made, CapturedStep), "rules keep the phase"
            quiet = quiet + 1 if made is step else 0
            step = made
            changing += [] if quiet else [rule.name]
            if quiet == len(rules):
                return step
        raise RewriteError(
            f"the rules {changing[-2]} and {changing[-1]} still change the step after {_MOST_ROUNDS} rounds: each "
            "undoes the other's rewrite; make one of them refuse it"
        )
