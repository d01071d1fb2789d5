"""Checks of the requested shardings against the mesh and the tensors of a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import tensorflow as tf

from autodist.errors import StrategyError
from autodist.graph.names import tensor
from autodist.graph.step import CapturedStep
from autodist.logs.formatting import did_you_mean, listed
from autodist.sharding import WHOLE, Annotations, Constraint, in_function

log = logging.getLogger("autodist")


def checked(step: CapturedStep, annotations: Annotations) -> Annotations:
    """Returns the annotations of variables and nodes that the step has; the others become `missing`.

    Dimensions for which a sharding says nothing stay whole.

    Raises:
        StrategyError: a sharding contradicts the mesh or its tensor.
    """
    variables, no_variables = _present(annotations.variables, step.by_name)
    constraints, no_nodes = _present(annotations.constraints, {*step.graph_index.nodes, *_nodes_of_functions(step)})
    for name, one in no_nodes.items():
        log.warning("the step has no node %s, so the sharding %s (%s) has no effect", name, one.sharding, one.origin)
    shape_of = _shapes(step)
    for what, one in annotations.requests():
        _require_axes(annotations, what, one)
    variables = {name: _of_rank(f"the variable {name}", one, shape_of(name)) for name, one in variables.items()}
    for name, one in variables.items():
        if step.by_name[name].is_seed:
            _require_whole_seed(name, one)
    constraints = {
        name: _divided(annotations, name, _of_rank(f"the tensor {name}", one, shape_of(tensor(name))), shape_of)
        for name, one in constraints.items()
    }
    missing = {**annotations.missing, **no_variables, **no_nodes}
    return replace(annotations, variables=variables, constraints=constraints, missing=missing)


def _nodes_of_functions(step: CapturedStep) -> Iterator[str]:
    for function in step.graph_def.library.function:
        yield from (in_function(function.signature.name, node.name) for node in function.node_def)


ShapeOf = Callable[[str], tf.TensorShape]


def _shapes(step: CapturedStep) -> ShapeOf:
    def shape_of(name: str) -> tf.TensorShape:
        """Returns the shape of a variable or a tensor; those of functions are unknown here."""
        if name in step.by_name:
            return tf.TensorShape(step.by_name[name].shape)
        return tf.TensorShape(None) if "@" in name else step.spec_of(name).shape

    return shape_of


def _present(
    named: Mapping[str, Constraint], known: Mapping[str, object] | set[str]
) -> tuple[dict[str, Constraint], dict[str, Constraint]]:
    """Returns the constraints of known names, and the others."""
    present = {name: one for name, one in named.items() if name in known}
    return present, {name: one for name, one in named.items() if name not in known}


def _require_whole_seed(name: str, one: Constraint) -> None:
    if one.sharding.divides:
        raise StrategyError(
            f"The sharding {one.sharding} ({one.origin}) divides {name}, the state of a random generator, which every "
            "place needs whole: its random numbers would be others than those of one device. Leave it out, for example "
            "by a pattern that ends in the names of kernels."
        )


def _require_axes(annotations: Annotations, what: str, one: Constraint) -> None:
    mesh = annotations.meshes[one.sharding.mesh]
    origin = annotations.mesh_origins.get(one.sharding.mesh)
    used = list(one.sharding.used())
    for axis in used:
        if axis not in mesh.names:
            raise StrategyError(
                f"The sharding {one.sharding} of {what} ({one.origin}) has the axis {axis}, but the mesh {mesh}"
                f"{f' ({origin})' if origin else ''} has {listed(mesh.names)}.{did_you_mean(axis, mesh.names)}"
            )
        if used.count(axis) > 1:
            raise StrategyError(
                f"The sharding {one.sharding} of {what} ({one.origin}) has the axis {axis} twice. Leave out "
                "one of them."
            )


def _of_rank(what: str, one: Constraint, shape: tf.TensorShape) -> Constraint:
    """Returns a sharding with one entry for each dimension of a tensor."""
    if shape.rank is None or shape.rank == one.sharding.rank:
        return one
    if shape.rank < one.sharding.rank:
        raise StrategyError(
            f"The sharding {one.sharding} ({one.origin}) has {one.sharding.rank} dimensions, but {what} of shape "
            f"{shape} has {shape.rank}. Leave out the others."
        )
    rest = (WHOLE,) * (shape.rank - one.sharding.rank)
    return replace(one, sharding=replace(one.sharding, dims=one.sharding.dims + rest))


def _divided(annotations: Annotations, name: str, one: Constraint, shape_of: ShapeOf) -> Constraint:
    """Returns the constraint of an activation, all of whose known lengths it divides."""
    shape, mesh = shape_of(tensor(name)), annotations.meshes[one.sharding.mesh]
    for dim, length in zip(one.sharding.dims, shape.as_list() if shape.rank is not None else ()):
        parts = mesh.count(dim.axes)
        if length is not None and length % parts:
            raise StrategyError(
                f"The sharding {one.sharding} ({one.origin}) divides a dimension of {name}, of shape {shape}, into "
                f"{parts} parts, but {length} is not divisible by {parts}. Change the length, or leave the dimension "
                "whole."
            )
    return one
