"""Programs beyond the matrix, each on two workers of two replicas: they train as one device does."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.equivalence.harness import Cluster, Trainings, largest_difference

log = logging.getLogger(__name__)

MOST = 1e-9

ALL_REDUCE = (
    "fit_dataset",
    "fit_evaluated",
    "fit_many_options",
    "fit_outputs_reduced_in_two_ways",
    "fit_own_parts",
    "fit_restored",
    "fit_several_steps_a_call",
    "fit_synchronized_norms",
    "fit_tf_keras",
    "graph_feedable_iterator",
    "graph_few_examples",
    "graph_initializable_iterator",
    "graph_terms_of_several_weights",
    "graph_tf_keras",
    "step_checkpoint_guide",
    "step_few_examples",
    "step_nested_functions",
    "step_on_records_of_its_own",
    "step_statistics",
)

PARAMETER_SERVERS = (
    "graph_global_norm",
    "fit_masked_kernel",
    "fit_metrics_of_weighted_examples",
    "fit_sharpness_aware",
    "fit_tf_keras_own_step",
    "graph_alternating_optimizers",
    "graph_averages_behind_a_mean",
    "graph_without_initialiser",
    "step_gradients_added_up",
    "step_large_matrix",
    "step_scalar_variable",
)

PARTITIONED = (
    "fit_gradient_accumulation",
    "fit_loss_scale",
    "fit_masked_lstm",
    "graph_called_step",
    "graph_decay_and_averages",
    "graph_loop",
    "graph_saved_and_loaded",
    "step_target_network",
    "step_tied_embedding",
    "step_two_functions",
    "step_two_optimizers",
    "step_written_past_assign",
)

RING = ("fit_last_batch_of_one_example", "function-embedding-adam-clipped")

MIXED = ("graph-embedding-adam-clipped",)

BY_STRATEGY = {
    "shuffle": ALL_REDUCE,
    "ps_load_balancing": PARAMETER_SERVERS,
    "partitioned_ps": PARTITIONED,
    "ring": RING,
    "parallax": MIXED,
}
"""Each program once; single-process tests cover the parts of a step under the other builders and in other layouts.
"""

FEATURES: dict[str, tuple[pytest.MarkDecorator, ...]] = {
    "fit_dataset": (pytest.mark.feature("fit", "data: data sets of `tf.data`"),),
    "fit_gradient_accumulation": (pytest.mark.feature("fit", "optimizer: gradient accumulation"),),
    "fit_last_batch_of_one_example": (pytest.mark.feature("fit", "data: uneven batches"),),
    "fit_loss_scale": (pytest.mark.feature("fit", "precision: loss scaling"),),
    "fit_many_options": (
        pytest.mark.feature("fit", "loss: `sample_weight`, `class_weight`"),
        pytest.mark.feature("fit", "loss: penalties on weights"),
        pytest.mark.feature("fit", "model: frozen layers"),
        pytest.mark.feature("fit", "optimizer: averages of weights"),
    ),
    "fit_masked_lstm": (
        pytest.mark.feature("fit", "loss: masks"),
        pytest.mark.feature("fit", "model: recurrent layers, `tf.while_loop`"),
    ),
    "fit_masked_kernel": (pytest.mark.feature("fit", "model: weights clipped, masked or normalised before their use"),),
    "fit_metrics_of_weighted_examples": (
        pytest.mark.feature("fit", "evaluation: metrics that are no means (AUC)"),
        pytest.mark.feature("fit", "loss: `sample_weight`, `class_weight`"),
    ),
    "fit_outputs_reduced_in_two_ways": (
        pytest.mark.feature("fit", "loss: several losses or outputs, each with its own reduction"),
    ),
    "fit_restored": (pytest.mark.feature("fit", "values: restored between steps from `tf.train.Checkpoint`"),),
    "fit_synchronized_norms": (pytest.mark.feature("fit", "model: synchronized batch normalisation"),),
    "fit_tf_keras": (pytest.mark.feature("fit", "model: layers and optimizers of tf_keras"),),
    "function-embedding-adam-clipped": (pytest.mark.feature("function", "optimizer: gradients clipped by their norm"),),
    "graph_alternating_optimizers": (pytest.mark.feature("session", "optimizer: several optimizers"),),
    "graph_decay_and_averages": (pytest.mark.feature("session", "optimizer: averages of weights"),),
    "graph_fixed_lengths": (
        pytest.mark.feature("session", "data: placeholders of a fixed length, a replica a worker"),
    ),
    "graph_few_examples": (pytest.mark.feature("session", "data: uneven batches"),),
    "graph_loop": (pytest.mark.feature("session", "model: recurrent layers, `tf.while_loop`"),),
    "graph_saved_and_loaded": (
        pytest.mark.feature("session", "values: given from Python between steps (`assign`, `load`)"),
        pytest.mark.feature("session", "values: saved and restored by `Saver`"),
    ),
    "graph_terms_of_several_weights": (
        pytest.mark.feature("session", "loss: masks"),
        pytest.mark.feature("session", "loss: several losses or outputs, each with its own reduction"),
    ),
    "graph_tf_keras": (pytest.mark.feature("session", "model: layers and optimizers of tf_keras"),),
    "step_checkpoint_guide": (
        pytest.mark.feature("function", "values: restored between steps from `tf.train.Checkpoint`"),
    ),
    "step_few_examples": (
        pytest.mark.feature("function", "data: uneven batches"),
        pytest.mark.feature("function", "loss: penalties on weights"),
    ),
    "step_nested_functions": (pytest.mark.feature("function", "step: a nested `tf.function`"),),
    "step_target_network": (pytest.mark.feature("function", "model: target networks"),),
    "step_two_functions": (
        pytest.mark.feature("function", "step: several steps that share variables"),
        pytest.mark.feature("function", "values: given from Python between steps (`assign`, `load`)"),
    ),
    "step_two_optimizers": (pytest.mark.feature("function", "optimizer: several optimizers"),),
}
"""The features that programs show, for the table of features."""

AT_SERVERS = {"ps_load_balancing": 2, "partitioned_ps": 2}
"""Trained in runs of their own, next to those of the others."""

GLOBAL = Cluster("ps_load_balancing", workers=2, replicas=1, batch="global")


def _case(name: str, cluster: Cluster, program: str) -> Any:
    marks = [pytest.mark.trains(cluster, program), pytest.mark.trains(None, program)]
    return pytest.param(cluster, program, id=f"{name}-{program}", marks=[*marks, *FEATURES.get(program, ())])


CASES = [
    _case(strategy, Cluster(strategy, run=AT_SERVERS.get(strategy, 0)), program)
    for strategy, programs in BY_STRATEGY.items()
    for program in programs
]
CASES += [
    _case("global", GLOBAL, "graph_global_batches"),
    _case("parallax", Cluster("parallax", workers=2, replicas=1), "graph_fixed_lengths"),
]

pytestmark = [pytest.mark.equivalence, pytest.mark.processes, pytest.mark.slow]


@pytest.mark.parametrize("cluster, program", CASES)
def test_many_devices_train_what_one_does(cluster: Cluster, program: str, trainings: Trainings) -> None:
    difference, variable = largest_difference(trainings.alone(program).joined, trainings.on(cluster, program).joined)
    log.info("%s-%s: %.1e (%s)", cluster.strategy, program, difference, variable)
    assert difference <= MOST, variable
