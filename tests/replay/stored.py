"""Captured steps in files, so that rewriting is tested independently of TensorFlow's and Keras's current capture."""

from __future__ import annotations

import dataclasses
import enum
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tensorflow as tf

from autodist.graph.in_step_all_reduce import InStepAllReduce, InStepAllReduceKind
from autodist.graph.parts import Aggregation, GradientCall, RowJoin, Term, Variable, VariableGradient
from autodist.graph.step import CapturedStep, Step
from autodist.kernels import KERNELS, LOCAL_KERNELS, SETTING_KERNELS, Kernel

FOLDER = Path(__file__).parent / "steps"

PIPELINES: Mapping[str, tuple[Kernel, ...]] = {"all": KERNELS, "setting": SETTING_KERNELS, "local": LOCAL_KERNELS}

_GRAPH, _REST = "graph_def.pb", "step.json"
_AS_IT_IS = ("inputs", "apart", "jit_compile", "is_global", "is_whole")
"""Fields of a Step that JSON can hold."""
_TUPLES = ("outputs", "targets")

_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class StoredStep:
    """A captured step, and the options of its run.

    Attributes:
        step: the step; its variables are not placed yet.
        planned_by: name of the stored step that the strategy is built for and that places the variables, if that is
            another one: a session runs a part of its whole graph.
        pipeline: a key of PIPELINES.
        reduces_outputs: True if it was rewritten with `Fetching.BY_ALL`, else `BY_EACH`.
    """

    step: CapturedStep
    planned_by: str | None = None
    pipeline: str = "all"
    reduces_outputs: bool = True

    def save(self, name: str) -> None:
        """Writes the file of that name; equal steps give equal bytes."""
        step = self.step
        rest = {
            "planned_by": self.planned_by,
            "pipeline": self.pipeline,
            "joins_outputs": self.reduces_outputs,
            **{field: getattr(step, field) for field in (*_AS_IT_IS, *_TUPLES)},
            **{field: [dataclasses.asdict(part) for part in getattr(step, field)] for field in _PARTS},
            "specs": {node.name: [_shown(spec) for spec in _specs(step, node.name)] for node in step.graph_def.node},
        }
        with zipfile.ZipFile(FOLDER / f"{name}.zip", "w") as file:
            for member, content in (
                (_GRAPH, step.graph_def.SerializeToString(deterministic=True)),
                (_REST, json.dumps(rest, default=_plain, sort_keys=True)),
            ):
                file.writestr(zipfile.ZipInfo(member, _EPOCH), content, zipfile.ZIP_DEFLATED, 9)

    @classmethod
    def load(cls, name: str) -> StoredStep:
        with zipfile.ZipFile(FOLDER / f"{name}.zip") as file:
            graph_def = tf.compat.v1.GraphDef.FromString(file.read(_GRAPH))
            rest = json.loads(file.read(_REST))
        specs = {
            f"{node}:{k}": tf.TensorSpec(shape, dtype)
            for node, found in rest["specs"].items()
            for k, (shape, dtype) in enumerate(found)
        }
        step = CapturedStep(
            graph_def,
            noted=specs.__getitem__,
            **{field: rest[field] for field in _AS_IT_IS},
            **{field: tuple(rest[field]) for field in _TUPLES},
            **{field: tuple(read(**part) for part in rest[field]) for field, read in _PARTS.items()},
        )
        return cls(step, rest["planned_by"], rest["pipeline"], rest["joins_outputs"])


def stored_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.zip"))


def undecided(step: CapturedStep) -> CapturedStep:
    """Returns the item without holders of its variables."""
    return replace(step, holders={})


def _specs(step: Step, node: str) -> Iterator[tf.TensorSpec]:
    """Yields the specs of a node's tensors."""
    index = 0
    while True:
        try:
            spec = step.spec_of(f"{node}:{index}")
        except (KeyError, IndexError):
            return
        yield spec
        index += 1


def _shown(spec: tf.TensorSpec) -> tuple[list[int | None] | None, str]:
    return (None if spec.shape.rank is None else spec.shape.as_list()), spec.dtype.name


def _plain(value: object) -> object:
    """Returns a JSON representation of a value that JSON cannot hold."""
    if isinstance(value, tf.DType):
        return value.name
    assert isinstance(value, enum.Enum), f"{value!r} of a step cannot be stored"
    return value.value


def _variable(shape: list[int], dtype: str, aggregation: str, **same: Any) -> Variable:
    return Variable(shape=tuple(shape), dtype=tf.as_dtype(dtype), aggregation=Aggregation(aggregation), **same)


def _gradient(tensors: list[str], row_join: str, **same: Any) -> VariableGradient:
    return VariableGradient(tensors=tuple(tensors), row_join=RowJoin(row_join), **same)


def _call(targets: list[str], terms: list[dict[str, Any]], **same: Any) -> GradientCall:
    return GradientCall(targets=tuple(targets), terms=tuple(_term(**term) for term in terms), **same)


def _term(parts: list[int], **same: Any) -> Term:
    return Term(parts=tuple(parts), **same)


def _all_reduce(how: str = InStepAllReduceKind.SUM.value, **same: Any) -> InStepAllReduce:
    return InStepAllReduce(how=InStepAllReduceKind(how), **same)


_PARTS: Mapping[str, Callable[..., Any]] = {
    "variables": _variable,
    "gradients": _gradient,
    "gradient_calls": _call,
    "in_step_all_reduces": _all_reduce,
}
"""Fields of a Step that hold parts of a kind, and the constructor of such a part."""
