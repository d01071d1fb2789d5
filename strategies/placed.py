"""PlacedBuilder: a builder whose faults are told with the place in the file that asked for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from autodist.errors import Place, StrategyError
from autodist.options.fields import OptionError
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec, StrategySection
from autodist.strategies.asking import ask_builder
from autodist.strategies.base import BuildsStrategy
from autodist.strategies.check import check_strategy
from autodist.strategies.override_variables import OverrideVariables
from autodist.strategies.variables import GraphLike

T = TypeVar("T")


@dataclass(frozen=True)
class PlacedBuilder:
    """Builds what another builder does, and checks it at once, while it is known who asked for what.

    Attributes:
        builder: decides.
        section: the YAML's, that named the builder.
    """

    builder: BuildsStrategy
    section: StrategySection

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        """The builder's strategy.

        Raises:
            StrategyError: it cannot be carried out on this step and these machines; names file and line.
        """

        def checked() -> strategy_pb2.Strategy:
            strategy = ask_builder(self.builder, graph_item, resource_spec)
            check_strategy(strategy, graph_item, resource_spec, self._place_of)
            return strategy

        return self.placed(checked)

    def placed(self, ask: Callable[[], T]) -> T:
        """What is asked of the builder.

        Raises:
            StrategyError: the builder's own; names file and line.
        """
        try:
            return ask()
        except StrategyError as error:
            if error.place is not None:
                raise
            raise self.at_its_place(error) from error

    def at_its_place(self, error: StrategyError) -> StrategyError:
        """An error, and what was noted of it, with the place of the option whose value it speaks of."""
        path = (error.option,) if isinstance(error, OptionError) else ()
        placed = StrategyError(error.problem, self.section.place(*path))
        for note in getattr(error, "__notes__", ()):
            placed.add_note(note)
        return placed

    def _place_of(self, variable: str, option: str) -> Place | None:
        """Where an option of a variable stands, or the nearest around it: in the pattern that the variable uses, if
        one matches it, else among the builder's own."""
        overrides = self.builder.overrides if isinstance(self.builder, OverrideVariables) else ()
        used = next((override for override in overrides if override.matches(variable)), None)
        return self.section.place(option) if used is None else self.section.place("variables", used.pattern, option)


@contextmanager
def telling_places(builder: BuildsStrategy | None) -> Iterator[None]:
    """What is found wrong with an option of a builder while it is open is told with its place, where that is known."""
    try:
        yield
    except OptionError as error:
        if isinstance(builder, PlacedBuilder):
            raise builder.at_its_place(error) from error
        raise
