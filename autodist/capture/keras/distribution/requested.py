"""The shardings that the distributions of Keras request for a captured step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from autodist.capture.keras.distribution.checks import check_distribution, require_made_under, warn_of_layouts
from autodist.capture.keras.distribution.layouts import annotations_of, layouts_of
from autodist.capture.keras.distribution.meshes import describe_mesh
from autodist.capture.keras.distribution.outputs import constraints_in
from autodist.capture.keras.distribution.run_settings import current_run
from autodist.capture.keras.distribution.variables import (
    KerasVariable,
    keras_variable,
    made_under,
    require_no_layout,
)
from autodist.errors import StrategyError
from autodist.sharding import Annotations


def requested_shardings(
    definition: tf.compat.v1.GraphDef, sources: Mapping[str, Any], trained: Collection[str]
) -> Annotations | None:
    """Returns the shardings by the distribution under which the variables of a step were made; None: there is none.

    The distribution need not be set any more: a script may call `fit` after its scope.

    Args:
        definition: the graph of the step.
        sources: the `tf.Variable`s of the step, by name.
        trained: the names of those that it trains.

    Raises:
        StrategyError: the variables were made under several distributions, or before the one that is set; or the
            distribution does not fit the run.
    """
    described = {name: one for name, source in sources.items() if (one := keras_variable(source)) is not None}
    found = _requested(sources, trained, described)
    return None if found is None else replace(found, constraints=constraints_in(definition))


def requested_in_graph(sources: Mapping[str, Any], trained: Collection[str]) -> Annotations | None:
    """Returns the shardings that a distribution requests for the variables of a graph of TensorFlow 1.

    Keys match the paths of Keras's variables, and the names of others. Slots, which TensorFlow names after their
    variables, are sharded as these.

    Args:
        sources: the variables of the graph, by name.
        trained: the names of those that it trains.

    Raises:
        StrategyError: as for `requested_shardings`, or a key matches slots alone.
    """
    slots = [name for name in sources if name not in trained and any(f"/{one}/" in f"/{name}" for one in trained)]
    described = {
        name: keras_variable(source) or KerasVariable(name, tuple(source.shape.as_list()))
        for name, source in sources.items()
        if name not in slots
    }
    return _requested(sources, trained, described, slots)


def _requested(
    sources: Mapping[str, Any],
    trained: Collection[str],
    described: Mapping[str, KerasVariable],
    slots: Collection[str] = (),
) -> Annotations | None:
    run = current_run()
    if run is not None and run.is_reference:
        return None
    found = list(dict.fromkeys(one for source in sources.values() if (one := made_under(source)) is not None))
    current = keras.distribution.distribution()
    if len(found) > 1:
        first, second = (describe_mesh(one.device_mesh) for one in found[:2])
        raise StrategyError(
            f"A step has variables of two distributions of Keras, with {first} and {second}. Use one distribution for "
            "all models of a step."
        )
    if type(current) is keras.distribution.ModelParallel or found:
        distribution = found[0] if found else current
        check_distribution(distribution)
        of_keras = {name: one for name in trained if (one := keras_variable(sources[name])) is not None}
        require_made_under(distribution, {one.path: sources[name] for name, one in of_keras.items()})
        warn_of_layouts(distribution, layouts_of(distribution, run, described.values()), described.values())
        return annotations_of(distribution, run, described, slots)
    require_no_layout(sources.values())
    return None
