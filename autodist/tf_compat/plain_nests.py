"""Nests of lists, tuples and dictionaries: the functions of `tf.nest`, faster, for these types only."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any


class NotPlainError(Exception):
    """Error: a nest contains other structures, or leaves without a hash."""


def form_of(nest: Any, form_of_leaf: Callable[[Any], Hashable]) -> Hashable:
    """Returns the structure of a nest with `form_of_leaf` of each leaf, visited in the order of `tf.nest`.

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
    """Returns a nest of the same structure with other leaves, in the order of `form_of`."""
    kind = type(nest)
    if kind is tuple or kind is list:
        return kind([filled(one, leaves) for one in nest])
    if kind is dict:
        values = {key: filled(nest[key], leaves) for key in _in_order(nest)}
        return {key: values[key] for key in nest}
    return next(leaves)


def numbered(nest: Any) -> Any:
    """Returns a nest with numbers as keys of dictionaries whose keys have no order, as `tf.nest` requires."""
    kind = type(nest)
    if kind is tuple or kind is list:
        return kind([numbered(one) for one in nest])
    if kind is dict:
        return {new: numbered(nest[key]) for new, key in zip(_numbers(nest), nest, strict=True)}
    return nest


def named_as(nest: Any, result: Any) -> Any:
    """Returns the result for `numbered(nest)` with the keys of `nest`."""
    kind = type(nest)
    if kind is tuple or kind is list:
        return kind([named_as(*pair) for pair in zip(nest, result, strict=True)])
    if kind is dict:
        return {key: named_as(nest[key], result[new]) for new, key in zip(_numbers(nest), nest, strict=True)}
    return result


def _numbers(mapping: dict[Any, Any]) -> list[Any]:
    """Returns a dictionary's keys in order of insertion, or numbers in their place."""
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
