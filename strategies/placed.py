"""PlacedBuilder: a builder whose errors include the position in the YAML file that configures it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from autodist.errors import Place, StrategyError
from autodist.options.fields import OptionError
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec, StrategySection
from autodist.strategies.base import BuildsStrategy
from autodist.strategies.build_strategy import call_builder
from autodist.strategies.check import check_strategy
from autodist.strategies.override_variables import OverrideVariables
from autodist.strategies.variables import GraphLike

T = TypeVar("T")


@dataclass(frozen=True)
class PlacedBuilder:
    """Delegates to a builder and validates its strategy at once, so that errors have a position in the YAML file.

    Attributes:
        builder: decides.
        section: the section of the YAML file that names the builder.
    """

    builder: BuildsStrategy
    section: StrategySection

    def build(self, graph_item: GraphLike, resource_spec: ResourceSpec) -> strategy_pb2.Strategy:
        """Returns the builder's strategy.

        Raises:
            StrategyError: this step or these machines do not support it; the message has file and line.
        """

        def checked() -> strategy_pb2.Strategy:
            strategy = call_builder(self.builder, graph_item, resource_spec)
            check_strategy(strategy, graph_item, resource_spec, self._place_of)
            return strategy

        return self.placed(checked)

    def placed(self, call: Callable[[], T]) -> T:
        """Returns the result of a call of the builder.

        Raises:
            StrategyError: the builder's own; the message has file and line.
        """
        try:
            return call()
        except StrategyError as error:
            if error.place is not None:
                raise
            raise self.at_its_place(error) from error

    def at_its_place(self, error: StrategyError) -> StrategyError:
        """Returns the error, with its notes, at the position of the option that it is about."""
        path = (error.option,) if isinstance(error, OptionError) else ()
        placed = StrategyError(error.problem, self.section.place(*path))
        for note in getattr(error, "__notes__", ()):
            placed.add_note(note)
        return placed

    def _place_of(self, variable: str, option: str) -> Place | None:
        """Returns the position of a variable's option, or the nearest enclosing one: in the pattern that the variable
        uses, if any, else among the builder's options."""
        overrides = self.builder.overrides if isinstance(self.builder, OverrideVariables) else ()
        used = next((override for override in overrides if override.matches(variable)), None)
        return self.section.place(option) if used is None else self.section.place("variables", used.pattern, option)


@contextmanager
def errors_with_place(builder: BuildsStrategy | None) -> Iterator[None]:
    """Adds the position in the YAML file, if known, to errors about options of a builder raised in the context."""
    try:
        yield
    except OptionError as error:
        if isinstance(builder, PlacedBuilder):
            raise builder.at_its_place(error) from error
        raise
