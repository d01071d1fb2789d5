"""Beside the matrix, each on two workers of two replicas: what one device trains."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.equivalence.harness import Cluster, Trainings, largest_difference

log = logging.getLogger(__name__)

MOST = 1e-9

ALL_REDUCE = (
    "fit_class_weight",
    "fit_dataset",
    "fit_ema",
    "fit_evaluated",
    "fit_frozen_layer",
    "fit_gradient_accumulation",
    "fit_last_batch_does_not_divide",
    "fit_last_batch_of_one_example",
    "fit_learning_rate_by_callback",
    "fit_loss_scale",
    "fit_masked_lstm",
    "fit_mean_with_sample_weight",
    "fit_metrics_and_validation",
    "fit_metrics_that_count",
    "fit_outputs_reduced_in_two_ways",
    "fit_own_parts",
    "fit_regularized",
    "fit_restored",
    "fit_sample_weight",
    "fit_sum_reduced_loss",
    "fit_synchronized_norms",
    "fit_weight_decay",
    "function-embedding-adam-clipped",
    "graph-embedding-adam-clipped",
    "graph_alternating_optimizers",
    "graph_decay_and_averages",
    "graph_evaluated_iterator",
    "graph_feedable_iterator",
    "graph_few_examples",
    "graph_initializable_iterator",
    "graph_loaded_variables",
    "graph_loop",
    "graph_one_example",
    "graph_run_options",
    "graph_saved_and_restored",
    "graph_terms_of_several_weights",
    "graph_tf_keras",
    "graph_weighted_loss",
    "step_checkpoint_guide",
    "step_fewer_examples_than_replicas",
    "step_large_matrix",
    "step_mean_and_penalty",
    "step_nested_functions",
    "step_on_records_of_its_own",
    "step_one_example",
    "step_scalar_variable",
    "step_statistics",
    "step_sum_reduced_loss",
    "step_tied_embedding",
    "step_two_optimizers",
    "step_written_past_assign",
)

PARAMETER_SERVERS = (
    "graph_global_norm",
    "fit_after_other_layers",
    "fit_last_batch_of_one_example",
    "fit_masked_kernel",
    "fit_metrics_and_validation",
    "graph_alternating_optimizers",
    "graph_without_initialiser",
    "step_large_matrix",
    "step_scalar_variable",
    "step_statistics",
)
"""What is not among PARTITIONED, whose shards lie at servers too, and some that have much that may lie there whole."""

PARTITIONED = (
    "fit_gradient_accumulation",
    "fit_loss_scale",
    "fit_masked_lstm",
    "graph-embedding-adam-clipped",
    "graph_called_step",
    "graph_decay_and_averages",
    "graph_loaded_variables",
    "graph_loop",
    "graph_saved_and_restored",
    "step_added_variables",
    "step_assigned_in_python",
    "step_checkpoint_guide",
    "step_target_network",
    "step_tied_embedding",
    "step_two_functions",
    "step_two_optimizers",
    "step_written_past_assign",
)

RING = ("fit_last_batch_of_one_example", "function-embedding-adam-clipped")

MIXED = ("graph_global_norm", "graph-embedding-adam-clipped")

BY_STRATEGY = {
    "shuffle": ALL_REDUCE,
    "ps_load_balancing": PARAMETER_SERVERS,
    "partitioned_ps": PARTITIONED,
    "ring": RING,
    "parallax": MIXED,
}

FEATURES: dict[str, tuple[pytest.MarkDecorator, ...]] = {
    "fit_class_weight": (pytest.mark.feature("fit", "loss: `sample_weight`, `class_weight`"),),
    "fit_dataset": (pytest.mark.feature("fit", "data: data sets of `tf.data`"),),
    "fit_ema": (pytest.mark.feature("fit", "optimizer: averages of weights"),),
    "fit_frozen_layer": (pytest.mark.feature("fit", "model: frozen layers"),),
    "fit_gradient_accumulation": (pytest.mark.feature("fit", "optimizer: gradient accumulation"),),
    "fit_last_batch_does_not_divide": (pytest.mark.feature("fit", "data: uneven batches"),),
    "fit_loss_scale": (pytest.mark.feature("fit", "precision: loss scaling"),),
    "fit_masked_lstm": (
        pytest.mark.feature("fit", "loss: masks"),
        pytest.mark.feature("fit", "model: recurrent layers, `tf.while_loop`"),
    ),
    "fit_masked_kernel": (pytest.mark.feature("fit", "model: weights clipped, masked or normalised before their use"),),
    "fit_metrics_that_count": (pytest.mark.feature("fit", "evaluation: metrics that are no means (AUC)"),),
    "fit_outputs_reduced_in_two_ways": (
        pytest.mark.feature("fit", "loss: several losses or outputs, each with its own reduction"),
    ),
    "fit_regularized": (pytest.mark.feature("fit", "loss: penalties on weights"),),
    "fit_restored": (pytest.mark.feature("fit", "values: restored between steps from `tf.train.Checkpoint`"),),
    "fit_sample_weight": (pytest.mark.feature("fit", "loss: `sample_weight`, `class_weight`"),),
    "fit_synchronized_norms": (pytest.mark.feature("fit", "model: synchronized batch normalisation"),),
    "function-embedding-adam-clipped": (pytest.mark.feature("function", "optimizer: gradients clipped by their norm"),),
    "graph_alternating_optimizers": (pytest.mark.feature("session", "optimizer: several optimizers"),),
    "graph_decay_and_averages": (pytest.mark.feature("session", "optimizer: averages of weights"),),
    "graph_few_examples": (pytest.mark.feature("session", "data: uneven batches"),),
    "graph_loaded_variables": (
        pytest.mark.feature("session", "values: given from Python between steps (`assign`, `load`)"),
    ),
    "graph_loop": (pytest.mark.feature("session", "model: recurrent layers, `tf.while_loop`"),),
    "graph_saved_and_restored": (pytest.mark.feature("session", "values: saved and restored by `Saver`"),),
    "graph_terms_of_several_weights": (
        pytest.mark.feature("session", "loss: several losses or outputs, each with its own reduction"),
    ),
    "graph_weighted_loss": (pytest.mark.feature("session", "loss: masks"),),
    "graph_tf_keras": (pytest.mark.feature("session", "model: layers and optimizers of tf_keras"),),
    "step_assigned_in_python": (
        pytest.mark.feature("function", "values: given from Python between steps (`assign`, `load`)"),
    ),
    "step_checkpoint_guide": (
        pytest.mark.feature("function", "values: restored between steps from `tf.train.Checkpoint`"),
    ),
    "step_fewer_examples_than_replicas": (pytest.mark.feature("function", "data: uneven batches"),),
    "step_mean_and_penalty": (pytest.mark.feature("function", "loss: penalties on weights"),),
    "step_nested_functions": (pytest.mark.feature("function", "step: a nested `tf.function`"),),
    "step_target_network": (pytest.mark.feature("function", "model: target networks"),),
    "step_two_functions": (pytest.mark.feature("function", "step: several steps that share variables"),),
    "step_two_optimizers": (pytest.mark.feature("function", "optimizer: several optimizers"),),
}
"""What programs show, for the table of features."""

AT_SERVERS = {"ps_load_balancing": 2, "partitioned_ps": 2}
"""Trained in runs of their own, beside those of the others."""

GLOBAL = Cluster("ps_load_balancing", workers=2, replicas=1, batch="global")


def _case(name: str, cluster: Cluster, program: str) -> Any:
    marks = [pytest.mark.trains(cluster, program), pytest.mark.trains(None, program)]
    return pytest.param(cluster, program, id=f"{name}-{program}", marks=[*marks, *FEATURES.get(program, ())])


CASES = [
    _case(strategy, Cluster(strategy, run=AT_SERVERS.get(strategy, 0)), program)
    for strategy, programs in BY_STRATEGY.items()
    for program in programs
]
CASES += [_case("global", GLOBAL, "graph_global_batches")]

pytestmark = [pytest.mark.equivalence, pytest.mark.processes, pytest.mark.slow]


@pytest.mark.parametrize("cluster, program", CASES)
def test_many_devices_train_what_one_does(cluster: Cluster, program: str, trainings: Trainings) -> None:
    difference, variable = largest_difference(trainings.alone(program).joined, trainings.on(cluster, program).joined)
    log.info("%s-%s: %.1e (%s)", cluster.strategy, program, difference, variable)
    assert difference <= MOST, variable
