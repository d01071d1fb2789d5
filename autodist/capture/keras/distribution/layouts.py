"""Translates a distribution of Keras into shardings over a mesh, as a strategy needs them.

A layout that the script writes is closed: propagation adds no axes to it. A variable without a layout is open.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras

from autodist.capture.keras.distribution.meshes import describe_mesh, mesh_of
from autodist.capture.keras.distribution.run_settings import RunSettings
from autodist.capture.keras.distribution.variables import KerasVariable
from autodist.errors import StrategyError
from autodist.logs.formatting import capitalised, counted, did_you_mean, listed, readable_shape, some_of
from autodist.sharding import WHOLE, Annotations, Constraint, Dim, Mesh, Origin, Sharding
from autodist.tf_compat.keras_versions import matches_layout_key

_MESH = "mesh"
"""The name of the mesh in the shardings."""

_OF_OUTPUT = "/output"
"""End of the keys for the outputs of layers, which Keras looks up as the path of the layer with this suffix."""


@dataclass(frozen=True)
class Layouts:
    """The shardings that a distribution requests.

    Attributes:
        mesh: the places of the run.
        batch_axis: the axis of the mesh over which the examples of a batch are divided.
        variables: one for each variable; None: it has no layout, and is open.
        outputs: by key of the LayoutMap, those of the outputs of layers.
        missing: by key, the shardings for variables that do not exist.
    """

    mesh: Mesh
    batch_axis: str
    variables: tuple[Constraint | None, ...]
    outputs: Mapping[str, Constraint]
    missing: Mapping[str, Constraint] = field(default_factory=dict)


def annotations_of(
    distribution: Any, run: RunSettings | None, described: Mapping[str, KerasVariable], slots: Iterable[str] = ()
) -> Annotations:
    """Returns the shardings that a distribution requests for the variables of a captured step.

    Args:
        distribution: a `ModelParallel` or a `LayoutMap`.
        run: the settings of the run.
        described: the variables that keys may match, by their names in the step. All others are open.
        slots: as for `layouts_of`.

    Raises:
        StrategyError: as for `layouts_of`.
    """
    layouts = layouts_of(distribution, run, described.values(), slots)
    found = zip(described, layouts.variables, strict=True)
    return Annotations(
        {_MESH: layouts.mesh},
        {name: constraint for name, constraint in found if constraint is not None},
        mesh_origins={_MESH: Origin(describe_mesh(_map_of(distribution).device_mesh))},
        missing=layouts.missing,
    )


def layouts_of(
    distribution: Any,
    run: RunSettings | None = None,
    variables: Iterable[KerasVariable] = (),
    slots: Iterable[str] = (),
) -> Layouts:
    """Returns the shardings that a `ModelParallel` or a `LayoutMap` requests.

    Args:
        distribution: the distribution. The examples of a LayoutMap's batches are divided over its first axis.
        run: the settings of the run; None: the places of the mesh are not checked.
        variables: the Keras variables of a step; none: keys that match nothing are not listed.
        slots: the paths of the variables of its optimizers, which are sharded as the variables that they belong to.

    Raises:
        StrategyError: a mesh, a key or a layout is not possible; the message names its place.
    """
    variables = [*variables]
    paths = [variable.path for variable in variables]
    layout_map = _map_of(distribution)
    translation = _Translation(distribution, layout_map, run)
    found = tuple(translation.of_variable(variable) for variable in variables)
    others = [key for key in layout_map if not any(key == path or matches_layout_key(key, path) for path in paths)]
    outputs = {key: translation.of_outputs(key) for key in others if key.removesuffix("$").endswith(_OF_OUTPUT)}
    idle = [key for key in others if key not in outputs] if variables else []
    for key in idle:
        _require_no_slot(key, slots)
    return Layouts(
        translation.mesh,
        translation.batch_axis,
        found,
        outputs,
        {key: translation.of_key(key) for key in idle},
    )


def constraint_of_output(distribution: Any, run: RunSettings | None, layout: Any, line: str, rank: int) -> Constraint:
    """Returns the sharding that a layout requests for an output of a layer.

    Args:
        distribution: the `ModelParallel` that is set.
        run: the settings of the run.
        layout: the `TensorLayout`.
        line: the line of the script that requests it, if it is none of the LayoutMap.
        rank: the rank of the output.

    Raises:
        StrategyError: the layout is not possible.
    """
    layout_map = _map_of(distribution)
    key = next((key for key in layout_map if layout_map[key] is layout), None)
    origin = _origin(key) if key is not None else f"distribute_tensor ({line})" if line else "distribute_tensor"
    return _Translation(distribution, layout_map, run).of_output(layout, origin, rank)


def describe_missing(layouts: Layouts, variables: Iterable[KerasVariable]) -> Iterator[str]:
    """Yields a message for each key that matches no variable, with the prefix that it may lack."""
    paths = [variable.path for variable in variables]
    for key, constraint in layouts.missing.items():
        behind = next((path for path in paths if re.fullmatch(f".*/(?:{key})", path)), None)
        hint = f" The path {behind} begins with the name of the model: write '.*/{key}'." if behind else ""
        yield f"{capitalised(str(constraint.origin))} matches no variable.{hint}"


def key_of(layout_map: Iterable[str], path: str) -> str | None:
    """Returns the key of a LayoutMap for a path: the path itself, else the pattern that matches it; None: none.

    Raises:
        StrategyError: two patterns match it.
    """
    keys = [*layout_map]
    if path in keys:
        return path
    matching = [key for key in keys if matches_layout_key(key, path)]
    if len(matching) > 1:
        raise StrategyError(
            f"{path} matches {listed(map(repr, matching))}, which are keys of the LayoutMap. Change them so that each "
            "variable and each output matches one key at most."
        )
    return matching[0] if matching else None


class _Translation:
    """Translates the layouts of a LayoutMap and of variables, all over one mesh."""

    def __init__(self, distribution: Any, layout_map: Any, run: RunSettings | None) -> None:
        self._layout_map, self._run = layout_map, run
        self._device_mesh = layout_map.device_mesh
        if self._device_mesh is None:
            raise StrategyError("The LayoutMap has no mesh; make it with one, LayoutMap(device_mesh).")
        self.mesh = mesh_of(self._device_mesh, run)
        self.batch_axis = self._batch_axis(distribution)
        for key in layout_map:
            _require_pattern(key)
            self.of_key(key)

    def _batch_axis(self, distribution: Any) -> str:
        """Returns the axis of the examples."""
        name = getattr(distribution, "batch_dim_name", None) or self.mesh.names[0]
        if name not in self.mesh.names:
            raise StrategyError(f"batch_dim_name of {type(distribution).__name__} is {self._unknown(name)}")
        return str(name)

    def of_variable(self, variable: KerasVariable) -> Constraint | None:
        """Returns the sharding of a variable; None if it has no layout."""
        if variable.layout is not None:
            return self._constraint(variable.layout, f"the layout of the variable {variable.path}", variable)
        key = key_of(self._layout_map, variable.path)
        return None if key is None else self._constraint(self._layout_map[key], _origin(key), variable)

    def of_key(self, key: str) -> Constraint:
        """Returns the sharding of a key, with the dimensions that its layout names."""
        return self._constraint(self._layout_map[key], _origin(key))

    def of_outputs(self, key: str) -> Constraint:
        """Returns the sharding of a key of outputs, without the axis of their examples."""
        constraint = self.of_key(key)
        return replace(constraint, sharding=constraint.sharding.without([self.batch_axis]))

    def of_output(self, layout: Any, origin: str, rank: int) -> Constraint:
        """Returns the sharding of an output, whose first dimension has the examples."""
        constraint = self._constraint(layout, origin)
        axes = layout.axes
        if len(axes) > rank:
            raise StrategyError(
                f"{capitalised(origin)} has the layout {axes} of {counted(len(axes), 'dimension')} for an output of "
                f"{rank}. Shorten it, or change the key."
            )
        if self.batch_axis in axes[1:]:
            raise StrategyError(
                f"{capitalised(origin)} has the layout {axes}: it divides another dimension of an output than the "
                f"first along {self.batch_axis!r}, the axis of the batch. Use another axis of the mesh."
            )
        dims = (*constraint.sharding.without([self.batch_axis]).dims, *[WHOLE] * (rank - len(axes)))
        return Constraint(Sharding(dims, mesh=_MESH), constraint.origin)

    def _constraint(self, layout: Any, origin: str, variable: KerasVariable | None = None) -> Constraint:
        if not isinstance(layout, keras.distribution.TensorLayout):
            kind = type(layout).__name__
            raise StrategyError(f"{capitalised(origin)} is a {kind}; use a tuple of axes, or a TensorLayout of Keras.")
        self._require_same_mesh(layout, origin)
        axes = layout.axes
        self._require_axes(axes, origin)
        rank = len(axes) if variable is None else len(variable.shape)
        if variable is not None and len(axes) > rank:
            raise StrategyError(
                f"{capitalised(origin)}, {axes}, has {counted(len(axes), 'dimension')}, and the variable "
                f"{variable.path} has {rank} (shape {readable_shape(variable.shape)}). Shorten the layout, or "
                "change the key."
            )
        dims = [WHOLE if axis is None else Dim((axis,)) for axis in axes]
        for length, axis in zip(variable.shape if variable else (), axes, strict=False):
            parts = self.mesh.count([axis] if axis not in (None, self.batch_axis) else [])
            if length % parts:
                raise StrategyError(
                    f"{capitalised(origin)}, {axes}, divides a dimension of {length} elements of the variable "
                    f"{variable and variable.path} into {parts} parts, which are not equal. Change the layout, the "
                    "layer or the size of the axis."
                )
        return Constraint(Sharding((*dims, *[WHOLE] * (rank - len(dims))), mesh=_MESH), Origin(origin))

    def _require_axes(self, axes: Sequence[Any], origin: str) -> None:
        for axis in (axis for axis in axes if axis is not None):
            if axis not in self.mesh.names:
                raise StrategyError(f"An axis of {origin} is {self._unknown(axis)}")
            if axes.count(axis) > 1:
                raise StrategyError(
                    f"{capitalised(origin)}, {axes}, divides two dimensions over the axis {axis!r} of the mesh "
                    f"{self.mesh}. An axis divides one dimension of a tensor; write None for the other."
                )

    def _require_same_mesh(self, layout: Any, origin: str) -> None:
        own = layout.device_mesh
        if own is None or own is self._device_mesh or mesh_of(own, self._run) == self.mesh:
            return
        raise StrategyError(
            f"{capitalised(origin)} has a mesh of its own, {describe_mesh(own)}. The LayoutMap has "
            f"{describe_mesh(self._device_mesh)}. A step has one mesh: pass axes alone, or the same mesh."
        )

    def _unknown(self, axis: Any) -> str:
        hint = did_you_mean(str(axis), self.mesh.names)
        return (
            f"{axis!r}, and {describe_mesh(self._device_mesh)} has no such axis.{hint} Its axes are "
            f"{listed(self.mesh.names)}."
        )


def _map_of(distribution: Any) -> Any:
    """Returns the LayoutMap of a distribution."""
    is_map = isinstance(distribution, keras.distribution.LayoutMap)
    return distribution if is_map else distribution._layout_map


def _origin(key: str) -> str:
    return f"the layout-map key {key!r}"


def _require_pattern(key: str) -> None:
    try:
        re.compile(key)
    except re.error as error:
        raise StrategyError(f"{capitalised(_origin(key))} is no regular expression: {error}. Correct it.") from error


def _require_no_slot(key: str, slots: Iterable[str]) -> None:
    matching = [path for path in slots if key == path or matches_layout_key(key, path)]
    if matching:
        raise StrategyError(
            f"{capitalised(_origin(key))} matches slots of an optimizer alone: {some_of(matching)}. Slots are sharded "
            "as the variables that they belong to; remove the key, or name the variables."
        )
