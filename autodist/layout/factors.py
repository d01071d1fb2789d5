"""Factors: scalars summed over the replicas, whose powers relate a replica's value to that of the whole batch."""

from __future__ import annotations

from dataclasses import dataclass

from autodist.layout.kinds import Elements, Examples


@dataclass(frozen=True)
class Count:
    """A factor: a number of rows, up to a constant common to all replicas."""

    of: Examples | Elements


@dataclass(frozen=True)
class PartialSum:
    """A factor: the scalar `tensor` divided by the factors of its own form, which is a partial sum."""

    tensor: str
    without: Factors


Factor = Count | PartialSum
Factors = frozenset[tuple[Factor, int]]

NONE: Factors = frozenset()
EXAMPLES = Count(Examples())


def times(left: Factors, right: Factors, sign: int = 1) -> Factors:
    """Returns left · right, or left / right if the sign is -1."""
    if not right:
        return left
    exponents = dict(left)
    for factor, exponent in right:
        exponents[factor] = exponents.get(factor, 0) + sign * exponent
    return frozenset(item for item in exponents.items() if item[1])


def power(factor: Factor, exponent: int) -> Factors:
    return frozenset([(factor, exponent)])


def additive_over(factors: Factors, rest: Factors) -> Factor | None:
    """Returns the factor f with factors = f · rest, or None; a value with `factors` is `rest` times a partial sum."""
    remaining = times(factors, rest, -1)
    if len(remaining) == 1:
        factor, exponent = next(iter(remaining))
        return factor if exponent == 1 else None
    return None


def describe(factors: Factors) -> str:
    """Formats factors for a message, sorted: "'Sum:0'^-1 · examples"."""
    return " · ".join(sorted(_describe_factor(factor, exponent) for factor, exponent in factors)) or "nothing"


def _describe_factor(factor: Factor, exponent: int) -> str:
    if isinstance(factor, PartialSum):
        name = f"'{factor.tensor}'"
    else:
        name = "examples" if isinstance(factor.of, Examples) else f"rows of '{factor.of.tensor}'"
    return name if exponent == 1 else f"{name}^{exponent}"
