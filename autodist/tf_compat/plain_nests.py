"""Nests of lists, tuples and dictionaries: what `tf.nest` does with any nest, for these alone and faster."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any


class NotPlainError(Exception):
    """A nest with other structures in it, or leaves that are not told apart by a hash."""


def form_of(nest: Any, form_of_leaf: Callable[[Any], Hashable]) -> Hashable:
    """The structure of a nest, and what is said of each of its leaves, which are looked at in the order of `tf.nest`.

    Raises:
        NotPlainError: from `form_of_leaf`, or keys of a dictionary have no order.
    """
    kind = type(nest)
    if kind is tuple or kind is list:
        return kind, *[form_of(one, form_of_leaf) for one in nest]
    if kind is dict:
        return kind, *[(key, form_of(nest[key], form_of_leaf)) for key in _in_order(nest)]
    return form_of_leaf(nest)


def filled(nest: Any, leaves: Iterator[Any]) -> Any:
    """A nest of the same structure with other leaves, in the order of `form_of`."""
    kind = type(nest)
    if kind is tuple or kind is list:
        return kind([filled(one, leaves) for one in nest])
    if kind is dict:
        found = {key: filled(nest[key], leaves) for key in _in_order(nest)}
        return {key: found[key] for key in nest}
    return next(leaves)


def numbered(nest: Any) -> Any:
    """A nest whose dictionaries have numbers for keys, where their own have no order; `tf.nest` takes it then."""
    kind = type(nest)
    if kind is tuple or kind is list:
        return kind([numbered(one) for one in nest])
    if kind is dict:
        return {new: numbered(nest[key]) for new, key in zip(_numbers(nest), nest, strict=True)}
    return nest


def named_as(nest: Any, found: Any) -> Any:
    """What was made of `numbered(nest)` with the keys of `nest`."""
    kind = type(nest)
    if kind is tuple or kind is list:
        return kind([named_as(*pair) for pair in zip(nest, found, strict=True)])
    if kind is dict:
        return {key: named_as(nest[key], found[new]) for new, key in zip(_numbers(nest), nest, strict=True)}
    return found


def _numbers(mapping: dict[Any, Any]) -> list[Any]:
    """A dictionary's keys, one after the other, or numbers in their places."""
    try:
        _in_order(mapping)
    except NotPlainError:
        return list(range(len(mapping)))
    return list(mapping)


def _in_order(mapping: dict[Any, Any]) -> list[Any]:
    try:
        return sorted(mapping)
    except TypeError as error:
        raise NotPlainError("keys of a dictionary have no order") from error
