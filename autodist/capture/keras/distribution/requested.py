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
from autodist.capture.keras.distribution.variables import keras_variable, made_under, require_no_layout
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
        described = {name: one for name, source in sources.items() if (one := keras_variable(source)) is not None}
        distribution = found[0] if found else current
        check_distribution(distribution)
        require_made_under(
            distribution, {one.path: sources[name] for name, one in described.items() if name in trained}
        )
        warn_of_layouts(distribution, layouts_of(distribution, run, described.values()), described.values())
        return replace(annotations_of(distribution, run, sources), constraints=constraints_in(definition))
    require_no_layout(sources.values())
    return None
