"""Graph traversal for layout propagation: backward from the requested tensors, then forward through the rule table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import tensorflow as tf

from autodist.graph.effects import PASSES
from autodist.graph.in_step_all_reduce import InStepAllReduce, InStepAllReduceKind
from autodist.graph.names import data_inputs, node_of
from autodist.graph.op_types import is_function_of_inputs, is_stateless
from autodist.graph.ops import Trait, having
from autodist.layout.bodies import DrawAt, Library, RowsOfDraw, leave
from autodist.layout.example_loops import loop_value
from autodist.layout.factors import EXAMPLES, NONE, Count, PartialSum, power, times
from autodist.layout.facts import (
    REPLICATED,
    WITHOUT_A_NODE,
    Fact,
    Form,
    GeneratorState,
    Recovery,
    Sharded,
    UnknownFact,
    Unvisited,
    common_generator_state,
    common_noise,
    form_of,
    mixed_within,
    names_a_sum,
    rows,
)
from autodist.layout.folding import Constants
from autodist.layout.kinds import (
    Elements,
    Examples,
    Kind,
    Mean,
    PerExample,
    Replicated,
    Sum,
    Unknown,
    Weight,
)
from autodist.layout.op_context import OpContext, tensor_name
from autodist.layout.table import NOT_FOLDED, TABLE
from autodist.layout.to_kinds import factor_of, kind_of
from autodist.layout.walk import GraphWalk

ShapeOf = Callable[[str], tf.TensorShape]
_UNKNOWN_SHAPE = tf.TensorShape(None)
_DEEPEST_CALL = 40


class Propagation(ABC):
    """Relates each replica's value of a tensor to the value for the whole batch."""

    @abstractmethod
    def kind(self, tensor: str) -> Kind:
        """Returns the kind of a tensor: how to combine the replicas' values.

        Args:
            tensor: its name, "node:0", or "node" for the first output.

        Raises:
            ValueError: the graph has no such node.
        """

    @abstractmethod
    def rows_for_each(self, tensor: str) -> int | None:
        """Returns the number of rows of a tensor that belong to each example.

        Returns None if the tensor has no such rows (a `PerExample` kind has their axis), if they are not in the order
        of the examples, or if the number is unknown or fractional.
        """

    @abstractmethod
    def draws_within(self, node: str) -> Mapping[DrawAt, RowsOfDraw | None]:
        """Returns the stateless random ops, in functions called by a node, that use a seed common to all replicas.

        Every replica draws the same numbers from such an op, although for different examples. The value is None if the
        number of rows per example is unknown.
        """


class GraphPropagation(Propagation):
    """Propagation over one graph; returned by `propagate`."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def kind(self, tensor: str) -> Kind:
        name = tensor_name(tensor)
        if self._frame.producer(name) is None:
            raise ValueError(f"The graph has no tensor '{tensor}'. Use its name in the analysed graph.")
        kind, node = kind_of(self._frame.fact(name)), self._frame.producer(name)
        if isinstance(kind, Unknown) and kind.reason in WITHOUT_A_NODE and node is not None:
            return replace(kind, reason=f"node '{node.name}' ({node.op}): {kind.reason}")
        return kind

    def rows_for_each(self, tensor: str) -> int | None:
        form = form_of(self._frame.fact(tensor_name(tensor)))
        result = form.rows if isinstance(form, Form) and not form.factors else None
        return None if result is None else result.whole_per

    def draws_within(self, node: str) -> Mapping[DrawAt, RowsOfDraw | None]:
        self._frame.follow(node)
        return self._frame.draws_within(node)

    def declare_whole(self, tensor: str) -> None:
        """Declares that a tensor holds the value of the whole batch on every replica.

        Raises:
            ValueError: propagation has already evaluated the tensor's node.
        """
        self._frame.declare(tensor_name(tensor), REPLICATED)

    def declare_share(self, tensor: str, weight: Weight | None) -> None:
        """Declares that a tensor holds each replica's share of the batch: its weight over the sum of all weights.

        Args:
            tensor: its name.
            weight: the weight of each replica. None: the shares sum to the whole, by an unspecified weight.

        Raises:
            ValueError: propagation has already evaluated the tensor's node.
        """
        name = tensor_name(tensor)
        factor = PartialSum(name, NONE) if weight is None else factor_of(weight)
        self._frame.declare(name, Form(factors=power(factor, 1)))


def propagate(
    graph_def: tf.compat.v1.GraphDef,
    batch_axes: Mapping[str, int],
    shapes: ShapeOf | Mapping[str, tf.TensorShape],
    *,
    declared: Mapping[str, Kind] | None = None,
    nodes: Mapping[str, tf.compat.v1.NodeDef] | None = None,
    in_step_all_reduces: Mapping[str, InStepAllReduce] | None = None,
    apart: Mapping[str, str] | None = None,
) -> GraphPropagation:
    """Prepares the layout analysis of a graph whose nodes run on every replica, each on its shard of the batch.

    Shards may differ in length. All axes other than the batch axis have equal lengths on all replicas. Constants are
    not rescaled: a sum divided by a constant number of examples is a sum. A read of a variable is replicated even after
    a write in the same step, because such writes are combined before the read.

    Args:
        graph_def: the captured single-device graph, with its function library.
        batch_axes: maps each tensor that holds the batch (a placeholder, an output of an iterator) to the axis that is
            split. All hold the same examples, or numbers of rows that are in proportion in every shard. Placeholders
            not listed are replicated.
        shapes: the static shape of each tensor, by name ("x:0").
        declared: kinds that take precedence over computed ones.
        nodes: the graph's nodes by name, if available.
        in_step_all_reduces: by their nodes. The one input of each is summed or gathered over all replicas before the
            step continues. A replicated value stays as it is, and so do its gradients.
        apart: for tensors in `batch_axes` whose rows do not belong to the examples of the others: the tensor whose rows
            count them.

    Returns:
        An object with a method `kind(tensor)`. Facts are computed on demand and cached.
    """
    shape_of = shapes if callable(shapes) else lambda name: shapes.get(name, _UNKNOWN_SHAPE)
    counted = {name: Count(Elements(tensor_name(by))) for name, by in (apart or {}).items()}
    seeds: dict[str, Fact] = {
        tensor_name(name): Form(Sharded(axis, counted.get(name, EXAMPLES))) for name, axis in batch_axes.items()
    }
    for name, kind in (declared or {}).items():
        seeds[tensor_name(name)] = _declared_fact(tensor_name(name), kind)
    nodes = nodes or {node.name: node for node in graph_def.node}
    return GraphPropagation(
        Frame(nodes, Library(graph_def.library), shape_of, seeds, in_step_all_reduces=in_step_all_reduces or {})
    )


def _declared_fact(tensor: str, kind: Kind) -> Fact:
    additive = power(PartialSum(tensor, frozenset()), 1)
    match kind:
        case Replicated(is_generator):
            return GeneratorState() if is_generator else REPLICATED
        case PerExample(axis):
            return rows(axis)
        case Sum():
            return Form(factors=additive)
        case Mean(Examples()):
            below = power(EXAMPLES, -1)
            return Form(factors=times(power(PartialSum(tensor, below), 1), below))
        case Unknown(reason):
            return UnknownFact(reason)
    raise ValueError(f"'{tensor}' cannot be declared as {kind}: only a mean over the examples can be declared.")


class Frame(GraphWalk[Fact]):
    """One graph or one function body, with a cache of the facts of its tensors."""

    def __init__(
        self,
        nodes: Mapping[str, tf.compat.v1.NodeDef],
        library: Library,
        shape_of: ShapeOf,
        seeds: Mapping[str, Fact],
        tag: str = "",
        in_step_all_reduces: Mapping[str, InStepAllReduce] | None = None,
    ) -> None:
        super().__init__(nodes, seeds)
        self._all_reduces = in_step_all_reduces or {}
        self._library = library
        self._shape_of = shape_of
        self._same: dict[object, str] = {}
        self._constants = Constants(self.producer, self.shape)
        self.tag = tag

    def declare(self, tensor: str, fact: Fact) -> None:
        """Sets the fact of a tensor that has not been evaluated yet."""
        name = node_of(tensor)
        if name in self._facts:
            raise ValueError(f"'{tensor}' cannot be declared: its node has been evaluated already. Declare it first.")
        self._known[tensor] = fact
        self._known_nodes.add(name)

    def producer(self, tensor: str) -> tf.compat.v1.NodeDef | None:
        return self._nodes.get(tensor.partition(":")[0])

    def shape(self, tensor: str) -> tf.TensorShape:
        return self._shape_of(tensor_name(tensor))

    def constant(self, tensor: str) -> np.ndarray | None:
        return None if tensor in self._known else self._constants.value(tensor)

    def _variable(self, tensor: str) -> tf.compat.v1.NodeDef | None:
        """Returns the VarHandleOp node behind a resource tensor, or None."""
        node = self.producer(tensor)
        while node is not None and node.op in PASSES:
            node = self.producer(node.input[0])
        return node if node is not None and node.op == "VarHandleOp" else None

    def draws_within(self, node: str) -> dict[DrawAt, RowsOfDraw | None]:
        """Returns the random ops found so far in functions called by a node."""
        within = f"{self.tag}{node}:0>"
        return {at: drawn for at, drawn in self._library.draws.items() if at[0].startswith(within)}

    def _assume(self, node: tf.compat.v1.NodeDef) -> Fact:
        return Unvisited()

    def _differs(self, assumed: Fact, found: Fact) -> bool:
        return assumed != found or (mixed_within(assumed) is None and mixed_within(found) is not None)

    def _correct(self, node: tf.compat.v1.NodeDef, assumed: Fact, found: Fact) -> Fact:
        if assumed == found:  # apart from examples that interact
            return found
        if isinstance(assumed, UnknownFact):  # it stays valid for every loop value
            return assumed
        if isinstance(assumed, Unvisited) and not names_a_sum(found):
            return found
        return UnknownFact(
            f"node '{node.name}' ({node.op}): the layout of the value changes between iterations of its loop"
        )

    def _in_cycle(self, node: tf.compat.v1.NodeDef) -> Fact:
        return UnknownFact(f"node '{node.name}' ({node.op}): it is part of an unsupported loop in the graph")

    def _evaluate(self, node: tf.compat.v1.NodeDef, sources: list[str]) -> Fact | list[Fact]:
        facts = [self._output(source) for source in sources]
        if node.name in self._all_reduces:
            return self._all_reduced(self._all_reduces[node.name], facts[0])
        rule = TABLE.get(node.op)
        ctx = OpContext(node, sources, facts, self)
        in_loop = loop_value(ctx, is_stateless(node.op))
        if in_loop is not None:
            return in_loop
        if node.op not in NOT_FOLDED and (rule is not None or is_function_of_inputs(node.op)):
            if all(fact is REPLICATED or fact == REPLICATED for fact in facts):
                return REPLICATED
            if (made := common_noise(facts) or common_generator_state(facts)) is not None:
                return made
        if rule is None and self._library.has(node.op):
            return self.call(ctx, node.op, facts, sources)
        if rule is None:
            return ctx.unknown("this op is not in the table of propagation rules", Recovery.BATCH_SHAPED)
        result = rule(ctx)
        if self.tag and node.op in having(Trait.BY_KEY) and not isinstance(result, list):
            self._library.note_draw((self.tag, node.name), ctx, result)
        return [_named(ctx, fact) for fact in result] if isinstance(result, list) else _named(ctx, result)

    def _all_reduced(self, all_reduce: InStepAllReduce, reduced: Fact) -> Fact:
        """Returns the fact of an in-step all-reduce, or of the rows gathered by it.

        The mean over the replicas of a mean over their examples is that mean itself, as on one device.
        """
        first = all_reduce.of or all_reduce.node
        before = self.fact(data_inputs(self._nodes[first])[0]) if first in self._nodes else None
        if before == REPLICATED or (all_reduce.is_mean and before is not None and isinstance(kind_of(before), Mean)):
            return reduced
        mixed_at = reduced.mixed_at if isinstance(reduced, Form) else None
        if all_reduce.how is InStepAllReduceKind.OWN_ROWS:
            base = before.rows if isinstance(before, Form) else None
            return (
                Form(base, mixed_at=mixed_at)
                if base
                else UnknownFact(f"node '{first}' gathers a tensor that has no batch axis")
            )
        return Form(mixed_at=mixed_at) if isinstance(reduced, Form) else REPLICATED

    def same_as(self, key: object, tensor: str) -> str:
        return self._same.setdefault(key, tensor)

    def call(self, ctx: OpContext, function: str, arguments: list[Fact], tensors: list[str]) -> list[Fact]:
        """Returns the facts of a library function's results; `tensors` are the names of its arguments in the caller."""
        if not self._library.has(function) or self.tag.count(">") >= 2 * _DEEPEST_CALL:
            why = f"its function '{function}' is not in the graph's library, or its calls are nested too deeply"
            return [ctx.unknown(why)] * _number_of_outputs(ctx.node)
        handles = [self._variable(name) for name in tensors]
        # A loop's output shapes hold in every iteration; a loop without output shapes has those of its inputs.
        is_loop = ctx.node.op in having(Trait.LOOP)
        shaped = [f"{ctx.node.name}:{k}" for k in range(len(tensors))] if is_loop else tensors
        body = self._library.body(function, [self.shape(name) for name in shaped], handles)
        seeds = dict(zip(body.arguments, arguments, strict=True))
        tag = f"{ctx.named()}>{function}>"
        frame = Frame(body.index.nodes, self._library, body.shape, seeds, tag)
        return leave([frame.fact(name) for name in body.outputs], ctx, tag)


def _named(ctx: OpContext, fact: Fact) -> Fact:
    """Adds the node's name to a reason that lacks one."""
    if isinstance(fact, UnknownFact) and fact.reason in WITHOUT_A_NODE:
        return ctx.unknown(f"for one of its inputs: {fact.reason}", fact.recovery)
    return fact


def _number_of_outputs(node: tf.compat.v1.NodeDef) -> int:
    """Returns the number of outputs of an op that calls functions: loops list their types in T, others in Tout."""
    return len(node.attr["Tout" if "Tout" in node.attr else "T"].list.type)
