"""Sharding: the axes of a mesh that divide each dimension of a tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

Layout = Sequence[str | Sequence[str] | None]
"""For each dimension: the axis that divides it, several axes (major first), None for a whole dimension, or "?" for one
that propagation may divide. Missing dimensions are whole."""

OPEN_ENTRY = "?"


@dataclass(frozen=True)
class Dim:
    """The sharding of one dimension.

    Attributes:
        axes: the axes that divide it, major first.
        is_open: True if propagation may add axes.
        priority: propagation considers shardings of lower numbers first; None: 0, if no other dimension has one.
    """

    axes: tuple[str, ...] = ()
    is_open: bool = False
    priority: int | None = None

    @classmethod
    def of(cls, entry: str | Sequence[str] | None) -> Dim:
        """Returns the sharding that an entry of a `Layout` stands for."""
        if entry == OPEN_ENTRY:
            return OPEN
        return cls(() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry))

    def __str__(self) -> str:
        text = "·".join(self.axes) or ("" if self.is_open else "–")
        text += "?" if self.is_open else ""
        return text if self.priority is None else f"{text} p{self.priority}"


WHOLE = Dim()
"""A dimension that stays whole."""

OPEN = Dim(is_open=True)
"""A dimension without axes so far."""


@dataclass(frozen=True)
class Sharding:
    """The division of a tensor over a mesh.

    Text form: `[a·b, c?, –] !d +e`. Axes a and b divide the first dimension, a being the major one. Axis c divides the
    second dimension, which is open: propagation may add axes. The third one stays whole. The tensor is not divided
    along d, and its value is the sum of its parts along e. Source: the sharding of Shardy.

    Attributes:
        dims: of each dimension.
        whole: axes along which the tensor must not be divided.
        partial: axes along which the value of the tensor is the sum of the places' values.
        mesh: the name of the mesh.
    """

    dims: tuple[Dim, ...]
    whole: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    mesh: str = "mesh"

    @classmethod
    def open(cls, rank: int, mesh: str = "mesh") -> Sharding:
        """Returns the sharding of a tensor of which nothing is known."""
        return cls((OPEN,) * rank, mesh=mesh)

    @classmethod
    def replicated(cls, rank: int, mesh: str = "mesh") -> Sharding:
        """Returns the sharding of a tensor that stays whole."""
        return cls((WHOLE,) * rank, mesh=mesh)

    @classmethod
    def parse(cls, text: str, mesh: str = "mesh") -> Sharding:
        """Returns the sharding that a text form describes.

        Raises:
            ValueError: it is none.
        """
        found = re.fullmatch(r"\[(.*?)\]((?: [!+]\w+)*)", text)
        if found is None:
            raise ValueError(f"{text!r} is no sharding; write it like '[a·b, c?, –] !d +e'")
        dims = tuple(_parse_dim(part.strip()) for part in found[1].split(",")) if found[1].strip() else ()
        marks = found[2].split()
        whole, partial = (tuple(m[1:] for m in marks if m[0] == mark) for mark in "!+")
        return cls(dims, whole, partial, mesh)

    def __str__(self) -> str:
        dims = ", ".join(map(str, self.dims))
        marks = [*(f" !{name}" for name in self.whole), *(f" +{name}" for name in self.partial)]
        return f"[{dims}]{''.join(marks)}"

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def axes(self) -> tuple[tuple[str, ...], ...]:
        """The axes of each dimension."""
        return tuple(dim.axes for dim in self.dims)

    @property
    def divides(self) -> bool:
        """True if an axis divides a dimension."""
        return any(dim.axes for dim in self.dims)

    @property
    def is_closed(self) -> bool:
        """True if no dimension is open."""
        return not any(dim.is_open for dim in self.dims)

    def closed(self) -> Sharding:
        """Returns this sharding without open dimensions and priorities."""
        return replace(self, dims=tuple(Dim(dim.axes) for dim in self.dims))

    def used(self) -> Iterator[str]:
        """Yields every axis that it names."""
        yield from (name for dim in self.dims for name in dim.axes)
        yield from self.whole
        yield from self.partial

    def without(self, axes: Iterable[str]) -> Sharding:
        """Returns this sharding without some axes; a dimension that loses its axes has no priority."""
        gone = set(axes)

        def kept(names: Iterable[str]) -> tuple[str, ...]:
            return tuple(name for name in names if name not in gone)

        dims = tuple(
            replace(dim, axes=kept(dim.axes), priority=dim.priority if dim.is_open or kept(dim.axes) else None)
            if gone & {*dim.axes} else dim
            for dim in self.dims
        )  # fmt: skip
        return replace(self, dims=dims, whole=kept(self.whole), partial=kept(self.partial))

    def with_axes(self, dimension: int, axes: Iterable[str]) -> Sharding:
        """Returns this sharding with other axes for one dimension."""
        dims = list(self.dims)
        dims[dimension] = replace(dims[dimension], axes=tuple(axes))
        return replace(self, dims=tuple(dims))


def _parse_dim(text: str) -> Dim:
    found = re.fullmatch(r"(–|[\w·]*)(\??)(?: p(\d+))?", text)
    if found is None or not text:
        raise ValueError(f"{text!r} is no dimension of a sharding; write it like 'a·b?', '–' or '? p1'")
    axes = () if found[1] in ("", "–") else tuple(found[1].split("·"))
    return Dim(axes, bool(found[2]), None if found[3] is None else int(found[3]))
