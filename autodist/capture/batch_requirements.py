"""Rejects steps that accept a single number of examples only, since each replica gets a part of the batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import tensorflow as tf

from autodist.batch.examples import part_lengths
from autodist.errors import CaptureError
from autodist.graph.find_stages import find_stages
from autodist.graph.flows import flows_of
from autodist.graph.names import data_inputs, is_control, node_of
from autodist.graph.ops import Trait, having
from autodist.graph.parts import Variable
from autodist.graph.seeds import live_calls, reduced_calls
from autodist.graph.step import CapturedStep
from autodist.graph.walks import reach
from autodist.layout import ByPosition, PerExample, Propagation, Unknown

_FIX = (
    "Leave the batch axis open (-1 or tf.shape(x)[0] in tf.reshape and tf.zeros; None in set_shape, tf.ensure_shape, "
    "placeholders and keras.Input; no drop_remainder=True; no stateful RNN), or train with one replica."
)


@dataclass(frozen=True)
class BatchDivision:
    """The assignment of a step's examples to replicas.

    Attributes:
        examples: number of examples in the batch.
        shares: number of replicas among which these are divided.
        replicas: number of replicas of all workers; other replicas may get examples of other batches.
        names: the script's names of inputs, by the name of the tensor, where they differ.
    """

    examples: int
    shares: int
    replicas: int
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def lengths(self) -> list[int]:
        """The numbers of examples that the step has to accept: those of the parts, unless one part is the whole batch.

        A part of one example broadcasts instead of raising an error; another length is tried in its place.
        """
        parts = {max(length, 1) for length in part_lengths(self.examples, self.shares)} - {self.examples}
        return sorted(parts | {self.examples + 1} if 1 in parts else parts)


def require_any_length(step: CapturedStep, division: BatchDivision) -> None:
    """Checks that the step accepts the part of its batch that a replica gets.

    The shapes of all tensors are inferred for such a part, as when the replica's graph is built; nothing runs.

    Raises:
        CaptureError: a constant of the step, or a variable with a row for each example, fits the whole batch only.
    """
    if division.replicas == 1 or division.examples == 0 or step.apart or not step.batch_axes:
        return
    flows = flows_of(step)
    fixed = _fixed_tensor(step, flows)
    if fixed is None and not _is_unclear(step, flows):
        return
    kept = _kept_rows(step, division.examples)
    if division.shares > 1:
        found = _fault_of(step, division, division.lengths)
        if found is not None:
            raise CaptureError(_message(step, division, *found, fixed, kept))
    elif kept and _fault_of(step, division, [division.examples + 1]) is not None:
        raise CaptureError(
            f"{_named(kept)} hold a row for each of the {division.examples} examples of a batch from step to step, as "
            f"in a stateful RNN, and each of the {division.replicas} replicas has other examples, so these rows cannot "
            f"be combined. {_FIX}"
        )


def _is_unclear(step: CapturedStep, flows: Propagation) -> bool:
    """Returns True if it is unknown how a loss or an output depends on the batch."""
    return any(isinstance(flows.kind(name), Unknown) for name in _results(step))


def _results(step: CapturedStep) -> list[str]:
    return [*step.outputs, *(t for call in step.gradient_calls for t in call.targets)]


def _fixed_tensor(step: CapturedStep, flows: Propagation) -> str | None:
    """Returns the first tensor before a result that has a row for each example and a fixed number of rows."""
    needed = reach(map(node_of, _results(step)), step.graph_index.data.__getitem__)
    for name in step.graph_index.order:
        kind = flows.kind(name) if name in needed else None
        if isinstance(kind, PerExample):
            shape = step.spec_of(f"{name}:0").shape
            if shape.rank is not None and shape[kind.axis] is not None:
                return f"{name}:0"
    return None


def _kept_rows(step: CapturedStep, examples: int) -> list[Variable]:
    """Returns the variables that the forward computation writes and that may have a row for each example."""
    trained = {g.variable for g in step.gradients}
    stages = find_stages(step)
    written = [step.by_handle[h] for h in sorted({h for w in stages.state_writes for h in stages.effects[w].writes})]
    return [v for v in written if v.shape[:1] == (examples,) and v.name not in trained and not v.trainable]


def fault_in_parts(step: CapturedStep, rows: Mapping[str, int], shares: int) -> str | None:
    """Returns TensorFlow's error if a step's shapes do not fit the whole batch or the parts of some replica; else None.

    Args:
        step: the step.
        rows: number of rows of each split input.
        shares: number of replicas among which they are divided.
    """
    lengths = zip(*(part_lengths(n, shares) for n in rows.values()), strict=True)
    distinct = {part: dict(zip(rows, part, strict=True)) for part in (tuple(rows.values()), *lengths)}
    return next((fault for part in distinct.values() if (fault := shape_fault(step, part)) is not None), None)


def _fault_of(step: CapturedStep, division: BatchDivision, lengths: list[int]) -> tuple[int, str] | None:
    """Returns the first of `lengths` that a step's shapes do not fit, and the error; None if the batch fails too."""
    for length in lengths:
        fault = shape_fault(step, length)
        if fault is not None:
            return (length, fault) if shape_fault(step, division.examples) is None else None
    return None


def shape_fault(step: CapturedStep, examples: int | Mapping[str, int]) -> str | None:
    """Returns TensorFlow's error if the shapes of a step do not fit a number of examples; None if they do.

    Args:
        step: the step.
        examples: the number of examples of all split inputs, or of each.
    """
    definition = tf.compat.v1.GraphDef()
    definition.CopyFrom(step.graph_def)
    axes = {node_of(name): axis for name, axis in step.batch_axes.items()}
    for node in definition.node:
        shape = step.spec_of(f"{node.name}:0").shape if node.name in axes else tf.TensorShape(None)
        if shape.rank is not None:
            own = examples if isinstance(examples, int) else examples[f"{node.name}:0"]
            lengths = [own if axis == axes[node.name] else length for axis, length in enumerate(shape)]
            node.attr["shape"].shape.CopyFrom(tf.TensorShape(lengths).as_proto())
    _show_shapes_of_lookups(definition)
    try:
        with tf.Graph().as_default():
            tf.graph_util.import_graph_def(definition, name="")
    except ValueError as error:
        return str(error).rstrip(".")
    return None


def _show_shapes_of_lookups(definition: tf.compat.v1.GraphDef) -> None:
    """Replaces table lookups by casts of the keys, since TensorFlow infers no shapes for lookups.

    This applies to tables with a scalar value for each key: the values then have the shape of the keys.
    """
    scalar = {node.name for node in definition.node if node.op in having(Trait.OF_SCALARS)}
    for node in definition.node:
        if node.op != "LookupTableFindV2" or node_of(node.input[0]) not in scalar:
            continue
        source, target = node.attr["Tin"].type, node.attr["Tout"].type
        node.op = "Cast"
        node.input[:] = [node.input[1], *filter(is_control, node.input)]
        node.attr.clear()
        node.attr["SrcT"].type, node.attr["DstT"].type = source, target


def _message(
    step: CapturedStep, division: BatchDivision, length: int, fault: str, fixed: str | None, kept: list[Variable]
) -> str:
    inputs = ", ".join(dict.fromkeys(division.names.get(name, node_of(name)) for name in step.batch_axes))
    why = [f"With {length}, TensorFlow says: {fault}."]
    if fixed is not None:
        why.append(f"{division.names.get(fixed, fixed)} has the fixed shape {step.spec_of(fixed).shape}.")
    if kept:
        why.append(f"{_named(kept)} hold a row for each of them from step to step, as a stateful RNN's do.")
    return (
        f"the step takes {division.examples} examples at a time and no other number, and its batch ({inputs}) is "
        f"divided among {division.shares} replicas. {' '.join(why)} {_FIX}"
    )


def _named(variables: list[Variable]) -> str:
    return ", ".join(f"{v.name} {list(v.shape)}" for v in variables)


_OF_SHAPES = having(Trait.OF_SHAPES)


def require_no_rows_by_position(step: CapturedStep, division: BatchDivision) -> None:
    """Checks that the training does not depend on rows of the batch that constants select by position.

    Raises:
        CaptureError: the training depends on such rows, and the batch is divided among several replicas.
    """
    if division.replicas == 1 or division.examples == 0 or not step.gradient_calls or not step.batch_axes:
        return
    taken = next(_taken_by_position(step, flows_of(step), division.examples), None)
    if taken is None:
        return
    node, line = step.graph_index.nodes[node_of(taken)], step.origin_of(node_of(taken))
    split = [division.names.get(name, node_of(name)) for name in step.batch_axes]
    axes = ", ".join(f'"{name}": None' for name in dict.fromkeys(split))
    raise CaptureError(
        f"{node.name} ({node.op}{f', {line}' if line else ''}) takes rows of the batch by their position, as y[2:] "
        f"does, and a loss depends on them. Each of the {division.replicas} replicas has a part of the batch, whose "
        f"rows at that position are different. Pass every replica the whole batch (batch_axis={{{axes}}}); or mark the "
        "rows by an input with a row for each example, such as a mask; or train with one replica."
    )


def _taken_by_position(step: CapturedStep, flows: Propagation, examples: int) -> Iterator[str]:
    """Yields the first tensors with such rows, before losses whose gradients are summed over the replicas."""
    reduced = reduced_calls(step)
    targets = [t for k in live_calls(step) if k in reduced for t in step.gradient_calls[k].targets]
    for name in reach(targets, lambda name: _unknown_inputs(step, flows, name)):
        kind = flows.kind(name)
        if isinstance(kind, ByPosition) and (kind.whole_up_to is None or examples > kind.whole_up_to):
            if not any(isinstance(flows.kind(i), ByPosition) for i in _unknown_inputs(step, flows, name)):
                yield name


def _unknown_inputs(step: CapturedStep, flows: Propagation, name: str) -> list[str]:
    """Returns the inputs of a tensor with an unknown kind; none for an op that returns a shape."""
    node = step.graph_index.nodes[node_of(name)]
    if node.op in _OF_SHAPES:
        return []
    return [name for name in data_inputs(node) if isinstance(flows.kind(name), Unknown)]
