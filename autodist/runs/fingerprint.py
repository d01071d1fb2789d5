"""Compares the steps that two workers have captured and finds the first difference."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import starmap
from typing import Any

import tensorflow as tf

from autodist.errors import CaptureMismatchError
from autodist.graph.baked_values import Baked, baked_values
from autodist.graph.names import is_control, node_of
from autodist.graph.renaming import Renaming
from autodist.graph.step import CapturedStep

log = logging.getLogger("autodist")

_SEPARATOR = b"\n"

_NUMBERS = re.compile(r"_\d+(?![0-9A-Za-z])")
"""The counter in a name, which depends on how many layers of a kind a process has made."""

Named = tuple[str, str, tuple[str, ...]]


@dataclass(frozen=True)
class Fingerprint:
    """The nodes, variables and gradients of a step, and the values in it.

    Attributes:
        variables: name, and shape with dtype, of each variable.
        gradients: the variable of each gradient, and its tensors.
        nodes: name, op and inputs of each node.
        apart: inputs with another number of rows than the first, each with the input that has the same number.
        kernels: the script's own kernels that rewrite the step, as text.
        values: constants and attributes that affect training, except seeds.
        lengths: shapes of the placeholders.
    """

    variables: tuple[tuple[str, str], ...] = ()
    gradients: tuple[tuple[str, tuple[str, ...]], ...] = ()
    nodes: tuple[Named, ...] = ()
    apart: tuple[tuple[str, str], ...] = ()
    kernels: tuple[str, ...] = ()
    values: tuple[Baked, ...] = ()
    lengths: tuple[str, ...] = ()

    @classmethod
    def of(cls, step: CapturedStep, kernels: tuple[str, ...] = ()) -> Fingerprint:
        return cls(
            tuple((v.name, f"{v.shape} {v.dtype.name}") for v in step.variables),
            tuple((g.variable, g.tensors) for g in step.gradients),
            tuple((n.name, n.op, tuple(n.input)) for n in step.graph_def.node),
            tuple(step.apart.items()),
            kernels,
            baked_values(step),
            tuple(str(tf.TensorShape(n.attr["shape"].shape)) for n in step.graph_index.of_op("Placeholder")),
        )

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """One line for each variable, gradient, input with its own number of rows, and node."""
        variables = [f"variable {name} {kind}" for name, kind in self.variables]
        gradients = [f"gradient of {variable}: {', '.join(tensors)}" for variable, tensors in self.gradients]
        apart = [f"input {name} has as many rows as {by}" for name, by in self.apart]
        nodes = [f"node {name} = {op}({', '.join(inputs)})" for name, op, inputs in self.nodes]
        return (*variables, *gradients, *apart, *nodes)

    @cached_property
    def structure(self) -> tuple[object, ...]:
        """The content of `lines` without the counters in names: nodes and variables are identified by position."""
        at = {name: k for k, (name, _, _) in enumerate(self.nodes)}
        positions = {name: k for k, (name, _) in enumerate(self.variables)}

        def place(name: str) -> tuple[object, ...]:
            node = node_of(name)
            return at.get(node, node), is_control(name), name.partition(":")[2]

        variables = [(_without_counters(name), kind) for name, kind in self.variables]
        gradients = [(positions.get(v, v), *map(place, tensors)) for v, tensors in self.gradients]
        apart = [tuple(map(place, pair)) for pair in self.apart]
        nodes = [(_without_counters(name), op, *map(place, inputs)) for name, op, inputs in self.nodes]
        return (*variables, *gradients, *apart, *nodes)

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()

    def packed_with(self, content: bytes) -> bytes:
        """Returns a message with the fingerprint and `content`."""
        return json.dumps([getattr(self, one.name) for one in fields(self)]).encode() + _SEPARATOR + content

    @classmethod
    def unpack(cls, message: bytes) -> tuple[Fingerprint, bytes]:
        """Returns the fingerprint and content of a message from `packed_with`."""
        packed, _, content = message.partition(_SEPARATOR)
        fingerprint = cls(*_as_tuples(json.loads(packed)))
        return replace(fingerprint, values=tuple(starmap(Baked, fingerprint.values))), content


def _as_tuples(content: Any) -> Any:
    """Returns a JSON value with tuples in place of lists."""
    return tuple(map(_as_tuples, content)) if isinstance(content, list) else content


def require_equal(chief: Fingerprint, mine: Fingerprint, name: str, step: CapturedStep | None = None) -> Renaming:
    """Checks that two workers captured the same step, up to counters in names; returns the chief's names by mine.

    A process that has made one more layer of a kind has higher counters ("dense_4" for "dense_3"), which do not affect
    the step. A different array only logs a warning, since it may be this worker's own part of the data.

    Args:
        chief: the step of the chief.
        mine: the step of this worker.
        name: name of this worker.
        step: the step of this worker; the error shows the line of the script that uses a value.

    Raises:
        CaptureMismatchError: the steps differ; shows the first different line or value, or the script's own kernels if
            those differ.
    """
    if chief.kernels != mine.kernels:
        theirs, ours = ("; ".join(one.kernels) or "none" for one in (chief, mine))
        raise CaptureMismatchError(
            f"{name} rewrites the step with other kernels of the script's own than the chief does:\n"
            f"    chief:  {theirs}\n    here:   {ours}\n"
            "The script must register the same kernels on every worker, in the same order and with the same options, "
            "before the first step (register_kernel)."
        )
    if chief.lines == mine.lines:
        _require_same_values(chief, mine, name, step)
        return Renaming()
    if chief.structure == mine.structure:
        _require_same_values(chief, mine, name, step)
        nodes = {ours: theirs for (theirs, *_), (ours, *_) in zip(chief.nodes, mine.nodes, strict=True)}
        variables = {ours: theirs for (theirs, _), (ours, _) in zip(chief.variables, mine.variables, strict=True)}
        return Renaming(_changes(nodes), _changes(variables))
    at, theirs, ours = _first_difference(chief, mine)
    raise CaptureMismatchError(
        f"{name} captured another step than the chief; they differ first at line {at}:\n"
        f"    chief:  {theirs}\n    here:   {ours}\n"
        "The script must build the same step on every worker: nothing in it may depend on the worker, the machine or "
        "chance. Random draws are equal on all workers after AutoDist(…), or from a generator with a seed."
    )


def _without_counters(name: str) -> str:
    return _NUMBERS.sub("", name)


def _changes(names: dict[str, str]) -> dict[str, str]:
    return {own: chief for own, chief in names.items() if own != chief}


def _first_difference(chief: Fingerprint, mine: Fingerprint) -> tuple[int, str, str]:
    """Returns the first line that differs both as text and in structure."""
    both = (zip(one.structure, one.lines, strict=True) for one in (chief, mine))
    pairs = list(zip(*both, strict=False))
    at = next(
        (k for k, (theirs, ours) in enumerate(pairs) if theirs[0] != ours[0] and theirs[1] != ours[1]), len(pairs)
    )
    theirs, ours = (one.lines[at] if at < len(one.lines) else "(nothing more)" for one in (chief, mine))
    return at + 1, theirs, ours


_FIX = (
    "The step must have the same numbers on every worker. After AutoDist(...), random and np.random draw the same "
    "numbers on all workers; other generators need a seed (np.random.default_rng(1), the seed= of a tuner or a study). "
    "To share one worker's number, use ad.reduce: rate = float(ad.reduce(rate if ad.is_chief else 0.0, 'sum'))."
)

_ROUNDING = {"float64": 1e-12, "complex128": 1e-12}
"""Relative difference of a number computed on different machines, by dtype; 1e-6 for all other dtypes."""


def _require_same_values(chief: Fingerprint, mine: Fingerprint, name: str, step: CapturedStep | None) -> None:
    """Checks that a step has the same numbers on two workers; logs a warning for arrays that differ.

    Raises:
        CaptureMismatchError: a number differs by more than rounding.
    """
    if chief.values == mine.values:
        return
    # Integers may differ in graphs that are traced for different numbers of examples.
    have_own_lengths = chief.lengths != mine.lengths
    theirs, ours = ({(one.at, one.what): one for one in side.values} for side in (chief, mine))
    for key in sorted({*theirs, *ours}):
        pair = theirs.get(key), ours.get(key)
        if is_same_value(*pair) or (have_own_lengths and all(map(_is_integer, pair))):
            continue
        node, op, _ = mine.nodes[key[0]]
        difference = (
            f"    chief:  {_format(pair[0])}\n    here:   {_format(pair[1])}\n{_used_by(step, node, op, key[1])}"
        )
        if all(one is not None and one.shape for one in pair):
            log.warning(
                "%s has another array in its step than the chief:\n%s Each worker trains with its own array. That is "
                "correct for its part of the data, if all parts have the same number of examples; pass parts of other "
                "sizes as arguments of the step. Everything else must be the same on every worker.",
                name, difference,
            )  # fmt: skip
            continue
        raise CaptureMismatchError(f"{name} has another number in its step than the chief:\n{difference} {_FIX}")


def is_same_value(chief: Baked | None, mine: Baked | None) -> bool:
    """Returns True if two values are equal, or differ by the rounding of different machines."""
    if chief is None or mine is None or chief == mine:
        return chief == mine
    numbers = _number(chief), _number(mine)
    is_alike = (chief.dtype, chief.shape) == (mine.dtype, mine.shape)
    if None in numbers or not is_alike:
        return False
    is_floating = "float" in chief.dtype or not chief.dtype
    return is_floating and math.isclose(*numbers, rel_tol=_ROUNDING.get(chief.dtype, 1e-6))  # type: ignore[arg-type]


def _number(value: Baked) -> float | None:
    try:
        return float(value.text)
    except ValueError:  # an array, a boolean or a complex number
        return None


def _is_integer(value: Baked | None) -> bool:
    """Returns True for a value that may be a number of examples, in a graph traced for a fixed batch size."""
    if value is None:
        return False
    number = _number(value)
    return "int" in value.dtype or (number is not None and number == int(number) > 1)


def _format(value: Baked | None) -> str:
    if value is None:
        return "(nothing)"
    if value.shape is None:
        return value.text
    shape = f" array of shape {value.shape}" if value.shape else ""
    return f"{value.text} ({value.dtype}{shape})"


def _used_by(step: CapturedStep | None, node: str, op: str, what: str) -> str:
    """Returns a sentence that names the node with the value, and the first line of the script that depends on it."""
    place = f"{what} of {node} ({op})" if what else f"the constant {node}"
    if step is None:
        return f"It is {place}."
    graph_index, front, visited = step.graph_index, [node], {node}
    while front and not any(map(step.origin_of, front)):
        front = [n for n in dict.fromkeys(c for f in front for c in graph_index.consumers[f]) if n not in visited]
        visited.update(front)
    line = next(filter(None, map(step.origin_of, front)), None)
    readers = ", ".join(graph_index.consumers[node][:2])
    return f"It is {place}{f', which {readers} reads' if readers else ''}{f' ({line} depends on it)' if line else ''}."
