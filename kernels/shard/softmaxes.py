"""Softmaxes along a divided dimension, as arithmetic whose maxima and sums are reduced over the places."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from autodist.graph.names import is_control, tensor
from autodist.graph.node_rules import Rules
from autodist.graph.step import PlacedStep
from autodist.graph.step_editor import StepEditor
from autodist.kernels.shard.propagate import Shardings


def split_softmaxes(step: PlacedStep, rules: Rules, shardings: Shardings) -> PlacedStep:
    """Replaces softmaxes and cross entropies along a divided dimension; returns the same step if there are none.

    The op itself would need its operand whole: all logits, for a head that is divided along the vocabulary. Of the
    arithmetic, a place computes its classes. Three numbers an example are reduced: the maximum, the sum of the
    exponentials, and the logit of the label.

        Softmax(x)    becomes    e / Sum(e)    with    e = Exp(x - Max(x))

    Source: the vocabulary-parallel cross entropy of Megatron-LM (Shoeybi et al., 2019).
    """
    names = [name for name in step.graph_index.order if _is_split(step, rules, shardings, name)]
    if not names:
        return step
    editor = StepEditor(step)
    for number, name in enumerate(names):
        _split(step, rules, editor, name, f"softmax/{number}")
    return editor.to_step()


def _is_split(step: PlacedStep, rules: Rules, shardings: Shardings, name: str) -> bool:
    node = step.graph_index.nodes[name]
    if node.op not in _AS_ARITHMETIC or any(map(is_control, node.input)) or _is_manual(step, name):
        return False
    operand = rules.of(name).operands[0]
    if operand is None or not operand.lengths or operand.lengths[-1] is None:
        return False
    return bool(shardings.of(operand.key, len(operand.lengths)).axes[-1])


def _is_manual(step: PlacedStep, name: str) -> bool:
    """Returns True for a node of a manual region, whose script calls all transfers itself."""
    return step.annotations is not None and any(name in region.body for region in step.annotations.regions.values())


def _split(step: PlacedStep, rules: Rules, editor: StepEditor[PlacedStep], name: str, prefix: str) -> None:
    node = step.graph_index.nodes[name]
    with editor.subgraph(prefix) as f:
        operands = [f.input(i, step.spec_of(tensor(i)).dtype, rules.static.lengths(tensor(i))) for i in node.input]
        results = [f.name(result) for result in _AS_ARITHMETIC[node.op](*operands)]
    for k, result in enumerate(results[1:], 1):
        editor.rewire(f"{name}:{k}", result)
    editor.pass_on(name, results[0], step.spec_of(f"{name}:0").dtype)  # fields of the step may name the first result


def _parts(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the operand minus its maximum, the exponentials of that, and their sum."""
    shifted = x - tf.reduce_max(x, -1, keepdims=True)
    powers = tf.exp(shifted)
    return shifted, powers, tf.reduce_sum(powers, -1, keepdims=True)


def _softmax(x: tf.Tensor) -> Sequence[tf.Tensor]:
    _, powers, total = _parts(x)
    return [powers / total]


def _log_softmax(x: tf.Tensor) -> Sequence[tf.Tensor]:
    shifted, _, total = _parts(x)
    return [shifted - tf.math.log(total)]


def _cross_entropy(x: tf.Tensor, labels: tf.Tensor) -> Sequence[tf.Tensor]:
    shifted, powers, total = _parts(x)
    loss = tf.reduce_sum(labels * (tf.math.log(total) - shifted), -1)
    return [loss, powers / total - labels]


def _sparse_cross_entropy(x: tf.Tensor, labels: tf.Tensor) -> Sequence[tf.Tensor]:
    """The loss is computed from the reduced numbers; a label outside of the classes is an error, as in the op."""
    count = x.shape[-1]
    present = tf.gather(tf.range(count, dtype=labels.dtype), labels)  # the labels
    classes = tf.expand_dims(tf.range(count, dtype=labels.dtype), 0)
    is_label = tf.cast(tf.equal(tf.expand_dims(present, 1), classes), x.dtype)
    shifted, powers, total = _parts(x)
    loss = tf.squeeze(tf.math.log(total), -1) - tf.reduce_sum(shifted * is_label, -1)
    return [loss, powers / total - is_label]


_AS_ARITHMETIC: dict[str, Callable[..., Sequence[tf.Tensor]]] = {
    "Softmax": _softmax,
    "LogSoftmax": _log_softmax,
    "SoftmaxCrossEntropyWithLogits": _cross_entropy,
    "SparseSoftmaxCrossEntropyWithLogits": _sparse_cross_entropy,
}
"""Functions of the operands of an op that return its results."""
