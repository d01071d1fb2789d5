"""Registry of classes by name: built-in ones, those registered by a script, and those in a user's module."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from autodist.errors import Place, StrategyError
from autodist.logs.formatting import did_you_mean, listed, nearest

_OURS = "autodist."

Class = TypeVar("Class", bound=type)


class Registry:
    """The classes of one sort, such as builders, that a YAML file can name.

    Args:
        sort: the sort, one word for messages ("builder").
        example: module and class of a user's class, for messages.
        fault: returns why an object is not such a class; None if it is.
        load: registers the built-in classes that are registered on demand.
    """

    def __init__(
        self, sort: str, example: str, fault: Callable[[Any], str | None], load: Callable[[], None] = lambda: None
    ) -> None:
        self._sort, self._example, self._fault, self._load = sort, example, fault, load
        self._known: dict[str, type] = {}

    def register(self, cls: Class, name: str | None = None) -> Class:
        """Registers a class under a name, by default its own.

        Raises:
            StrategyError: the class is not of this sort, or another class has its name.
        """
        self._require(cls, getattr(cls, "__qualname__", repr(cls)), None)
        name = name or cls.__name__
        if not cls.__module__.startswith(_OURS):
            self._load()  # otherwise a built-in name could be taken
        known = self._known.setdefault(name, cls)
        # A reloaded module, as in a notebook, defines the same class again; that is not a conflict.
        if known is not cls and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise StrategyError(
                f"A {self._sort} named {name} is registered already, from {known.__module__}; "
                f"give the one in {cls.__module__} another name."
            )
        self._known[name] = cls
        return cls

    def names(self) -> tuple[str, ...]:
        """Returns all registered names, sorted."""
        self._load()
        return tuple(sorted(self._known))

    def name_of(self, cls: type) -> str:
        """Returns the name by which `find` finds a class: its registered name, or module and class."""
        registered = next((name for name, known in self._known.items() if known is cls), None)
        return registered or f"{cls.__module__}.{cls.__qualname__}"

    def find(self, name: str, place: Place | None = None) -> type:
        """Returns the class of a name.

        Args:
            name: a registered name, or module and class ("my_package.MyBuilder").
            place: position of the name, for messages.

        Raises:
            StrategyError: there is no such class, module or attribute, or it is not of this sort.
        """
        if name not in self._known:
            self._load()
        if name in self._known:
            return self._known[name]
        module_name, _, attribute = name.rpartition(".")
        if not module_name or not all(part.isidentifier() for part in name.split(".")):
            raise StrategyError(
                f"There is no {self._sort} named {name}.{did_you_mean(name, self._known)} Known names are "
                f"{listed(self.names())}; name a class of yours with its module, as in {self._example}.",
                place,
            )
        return self._require(_attribute(self._module(module_name, place), attribute, place), name, place)

    def _require(self, candidate: Any, name: str, place: Place | None) -> type:
        fault = self._fault(candidate)
        if fault is not None:
            raise StrategyError(f"{name} is not a {self._sort} but {fault}", place)
        return candidate

    def _module(self, name: str, place: Place | None) -> Any:
        failure = f"The {self._sort}'s module {name} cannot be imported"
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise StrategyError(f"{failure}: {error}.", place) from error
            raise StrategyError(
                f"There is no module {error.name}. It must be in the folder of the script or be installed.", place
            ) from error
        except ImportError as error:
            raise StrategyError(f"{failure}: {error}.", place) from error
        except Exception as error:  # any error in a user's module
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = "" if isinstance(error, SyntaxError) else f" ({frame.filename}:{frame.lineno})"
            raise StrategyError(f"{failure}: {type(error).__name__}: {error}{where}. Correct it.", place) from error


def _attribute(module: Any, name: str, place: Place | None) -> Any:
    if hasattr(module, name):
        return getattr(module, name)
    classes = [key for key, value in vars(module).items() if isinstance(value, type)]
    hint = did_you_mean(name, classes) or f" The most similar classes there are {listed(nearest(name, classes))}."
    raise StrategyError(f"The module {module.__name__} has no {name}.{hint}", place)
