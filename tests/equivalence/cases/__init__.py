"""Training programs: each trains a model and returns all trained values. They run alone and under AutoDist."""

from tests.equivalence.cases import (
    cotangents,
    evaluations,
    fit_extras,
    graph_data,
    graph_extras,
    graph_programs,
    in_parts,
    jit_compiled,
    keras_programs,
    legacy_programs,
    moved_weights,
    odd_types,
    shared_steps,
    step_extras,
    written_variables,
)
from tests.equivalence.cases.base import PROGRAMS, Alone, Program, Results, Trainer

__all__ = [
    "PROGRAMS",
    "Alone",
    "Program",
    "Results",
    "Trainer",
    "cotangents",
    "evaluations",
    "fit_extras",
    "graph_data",
    "graph_extras",
    "graph_programs",
    "in_parts",
    "jit_compiled",
    "keras_programs",
    "legacy_programs",
    "moved_weights",
    "odd_types",
    "shared_steps",
    "step_extras",
    "written_variables",
]
