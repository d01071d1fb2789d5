"""Rewrites of kernels as text: the step before and after, in one text.

Each line is a node, in the notation of `tests.unit.graph.graph_text`. A kernel removes the lines that begin with "-",
adds those that begin with "+", and keeps the others. Without such lines it must return the step that it received.

      table = VarHandleOp(shape=[6, 2])
      ids = Placeholder(dtype=int32, shape=[None])
      axis = 0
    - read = ReadVariableOp(table)
    - rows = GatherV2(read, ids, axis)
    + rows = ResourceGather(table, ids)
      return rows:0

"return" precedes the outputs of the step, "run" its targets. Annotations have the notation of
`tests.unit.kernels.annotation_text`; a step with annotations has a variable for each VarHandleOp. If the environment
has AUTODIST_RECORD=1, the text in the test's file is replaced by the rewrite that the kernel makes. The test fails
nevertheless, so that somebody reads it.
"""

from __future__ import annotations

import difflib
import os
import pathlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import tensorflow as tf

from autodist.graph.imported import ImportedGraph
from autodist.graph.names import tensor
from autodist.graph.step import CapturedStep, Step
from autodist.kernels.base import AnyKernel, Context
from tests.unit.graph.graph_text import from_text, lines_of
from tests.unit.kernels.annotation_text import split_annotations, text_of_annotations, variables_of
from tests.unit.kernels.in_one_process import plan


def cases(texts: Mapping[str, str]) -> pytest.MarkDecorator:
    """Parametrizes a test by texts; the key of each is its claim."""
    return pytest.mark.parametrize("text", texts.values(), ids=texts)


def step_of(text: str, phase: type[Step] = CapturedStep, **fields: Any) -> Step:
    """Returns a step with a graph, outputs ("return a:0, b:0") and targets ("run a, b") from a text.

    As in a captured step, the dtype and shape of every tensor is known.
    """
    lines, annotations = split_annotations(textwrap.dedent(text).strip().splitlines())
    outputs, targets = (
        tuple(name for line in lines if line.startswith(word) for name in line.removeprefix(word).split(", "))
        for word in ("return ", "run ")
    )
    graph_def = from_text("\n".join(line for line in lines if not line.startswith(("return ", "run "))))
    graph = ImportedGraph()
    graph.import_nodes(graph_def)

    def spec_of(name: str) -> tf.TensorSpec:
        found = graph.get_tensor_by_name(tensor(name))
        return tf.TensorSpec(found.shape, found.dtype)

    if annotations is not None:
        fields = {"annotations": annotations, "variables": variables_of(graph_def), **fields}
    return phase(graph_def, outputs=outputs, targets=targets, noted=spec_of, **fields)


def assert_rewrites(
    kernel: AnyKernel,
    text: str,
    workers: int = 1,
    replicas: int = 1,
    hides: tuple[str, ...] = (),
    blocks: Mapping[str, Sequence[str]] | None = None,
    **fields: Any,
) -> Step:
    """Asserts that a kernel rewrites the step before a text to the step after it, and returns the latter.

    Args:
        kernel: the kernel.
        text: both steps, as above.
        workers: the number of workers. The step is rewritten for the first.
        replicas: the number of replicas of each worker.
        hides: scopes whose nodes are not in the text.
        blocks: the scopes of the blocks that the strategy recomputes.
        fields: of the step, besides its graph, outputs and targets.
    """
    lines = textwrap.dedent(text).strip("\n").splitlines()
    marked = lines if any(line.startswith(("+ ", "- ")) for line in lines) else [f"  {line}" for line in lines]
    phase = CapturedStep if kernel.takes is Step else kernel.takes
    before = step_of("\n".join(line[2:] for line in marked if line[0] != "+"), phase, **fields)
    given = list(lines_of_step(before))
    strategy = plan(before, workers, replicas)
    for name, scopes in (blocks or {}).items():
        strategy.recomputed_blocks.add(name=name, scopes=scopes)
    after = kernel.apply(before, Context(strategy, 0))
    assert list(lines_of_step(before)) == given, f"{kernel.name} has changed the step that it received"
    made = [line for line in lines_of_step(after) if not line.startswith(hides)]
    if sorted(made) != sorted(line[2:] for line in marked if line[0] != "-"):
        lines = difflib.unified_diff(given, made, n=len(before.graph_def.node), lineterm="")
        found = [f"{line[0]} {line[1:]}" for line in lines][3:] or ["(the step of the text, unchanged)"]
        _record(text, found)
        pytest.fail(f"{kernel.name} makes another rewrite:\n" + "\n".join(found), pytrace=False)
    assert (after is before) == (marked is not lines)
    return after


def lines_of_step(step: Step) -> Iterable[str]:
    yield from lines_of(step.graph_def).values()
    for word, names in (("return", step.outputs), ("run", step.targets)):
        if names:
            yield f"{word} {', '.join(names)}"
    if isinstance(step, CapturedStep) and step.annotations is not None:
        yield from text_of_annotations(step.annotations)


def _record(text: str, found: list[str]) -> None:
    """Replaces a text in the file of the running test, on request."""
    if os.environ.get("AUTODIST_RECORD") != "1":
        return
    assert "CI" not in os.environ, "texts are recorded by a person who reads them"
    path = pathlib.Path(os.environ["PYTEST_CURRENT_TEST"].partition("::")[0])
    source = path.read_text(encoding="utf-8")
    literal = f'"""{text}"""'
    assert source.count(literal) == 1, f"{path} has this text not exactly once, as a literal of its own"
    first, last = text.strip("\n").splitlines()[0], text[text.rindex("\n") :]
    margin = first[: len(first) - len(textwrap.dedent(text).strip("\n").splitlines()[0])]
    recorded = "\n" + textwrap.indent("\n".join(found), margin) + last
    path.write_text(source.replace(literal, f'"""{recorded}"""'), encoding="utf-8")
