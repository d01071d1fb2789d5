"""StepEditor: the operations with which kernels change a step; outputs and targets follow changes of the graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Generic, TypeVar

import tensorflow as tf

from autodist.errors import RewriteError
from autodist.graph.editor import GraphEditor
from autodist.graph.inferred_specs import infer_specs
from autodist.graph.names import node_of, output_index, tensor
from autodist.graph.parts import OuterStep
from autodist.graph.step import Step
from autodist.graph.subgraph import SpecOf, SubgraphBuilder, subgraph

Phase_co = TypeVar("Phase_co", bound=Step, covariant=True)


class StepEditor(GraphEditor, Generic[Phase_co]):
    """A step under modification, which keeps its phase.

    Outputs and targets count as consumers that stand outside of the graph: an output is read, a target is a control
    dependency. `rewire` and `replace_control` without `consumers` therefore change both, and removing a node removes
    the target.

    Args:
        step: the step to start from; not modified.
    """

    def __init__(self, step: Phase_co) -> None:
        super().__init__(step.graph_def, step.graph_index)
        self._step = step
        self._outputs = step.outputs
        self._targets, self._background, self._standing = map(
            dict.fromkeys, (step.targets, step.background_nodes, step.standing_nodes)
        )
        self._outer = {key: (one, dict.fromkeys(one.nodes)) for key, one in step.outer_steps.items()}
        self._initializers = dict(step.initializers)
        self._specs: dict[str, tf.TensorSpec] = {}

    @property
    def outputs(self) -> tuple[str, ...]:
        """The tensors that the step returns."""
        return self._outputs

    @property
    def targets(self) -> tuple[str, ...]:
        """The nodes that run without being returned."""
        return tuple(self._targets)

    def to_step(self, **changes: Any) -> Phase_co:
        """Returns the step in its current state.

        Args:
            **changes: new values for other fields of the step.

        Raises:
            RewriteError: an output of the step has been removed.
        """
        lost = next((name for name in self._outputs if node_of(name) not in self), None)
        if lost is not None:
            raise RewriteError(f"{lost}, an output of the step, is no longer in the graph: a kernel removed it")
        return self._with_roots(changes).with_graph(self.to_graph_def())

    to_item = to_step  # its former name, which kernels of scripts may use

    def named(self, **changes: Any) -> frozenset[str]:
        """Returns the nodes that the step refers to in its current state (`Step.named`); `changes` as for `to_step`."""
        return self._with_roots(changes).named

    # -- shapes and dtypes -----------------------------------------------------------------------------------------

    def spec(self, name: str) -> tf.TensorSpec:
        """Returns shape and dtype of a tensor: as captured, as recorded since, or as TensorFlow infers them.

        Raises:
            KeyError: the graph has no such tensor.
        """
        name = tensor(name)
        try:
            return self._noted(name)
        except KeyError:
            return infer_specs(self._nodes, self.library, self._noted, node_of(name))[output_index(name)]

    def shape(self, name: str) -> tf.TensorShape:
        """Returns a tensor's shape, as far as it is known."""
        try:
            return self.spec(name).shape
        except KeyError:
            return tf.TensorShape(None)

    def note(self, specs: Mapping[str, tf.TensorSpec]) -> None:
        """Records shapes and dtypes of new tensors, by name."""
        self._specs.update(specs)

    @contextmanager
    def subgraph(self, prefix: str) -> Iterator[SubgraphBuilder]:
        """Builds new arithmetic (`autodist.graph.subgraph`) with known specs of its inputs; records the new specs."""
        with subgraph(self, prefix, self.spec) as made:
            yield made
        self.note(made.specs())

    # -- outputs and targets follow -------------------------------------------------------------------------------

    def rewire(self, old: str, new: str, consumers: Iterable[str] | None = None) -> int:
        if consumers is None:
            self.replace_output(old, new)
        return super().rewire(old, new, consumers)

    def replace_control(self, old: str, new: Iterable[str], consumers: Iterable[str] | None = None) -> None:
        after = list(new)
        if consumers is None:
            self.replace_target(old, after)
        super().replace_control(old, after, consumers)

    def remove(self, names: Iterable[str]) -> None:
        gone = list(names)
        super().remove(gone)
        self.drop_targets(gone)

    # -- outputs and targets ---------------------------------------------------------------------------------------

    def set_outputs(self, tensors: Iterable[str]) -> None:
        """Sets the outputs of the step."""
        self._outputs = tuple(map(tensor, tensors))

    def replace_output(self, old: str, new: str) -> None:
        """Replaces the output `old` of the step by `new`."""
        self._outputs = tuple(tensor(new) if name == tensor(old) else name for name in self._outputs)

    def run(self, names: Iterable[str], outer: str = "") -> None:
        """Adds targets: nodes that run in every step without being returned, or in the outer step of a key."""
        (self._outer[outer][1] if outer else self._targets).update(dict.fromkeys(names))

    def write_before_reads(self, name: str, writes: Sequence[str], readers: Iterable[str]) -> None:
        """Makes the readers of a node's results wait for writes that follow it, and the step, if it returns them."""
        for reader in readers:
            self.add_control(reader, writes)
        if name in map(node_of, self.outputs):
            self.run(writes)

    def add_outer_step(self, key: str, one: OuterStep) -> None:
        """Adds an outer step, which runs once every some steps; `run` adds its nodes."""
        self._outer[key] = one, {}

    def serve(self, names: Iterable[str]) -> None:
        """Adds nodes to the background program, which runs once for every step of this worker."""
        self._background.update(dict.fromkeys(names))

    def stand(self, names: Iterable[str]) -> None:
        """Adds nodes to the standing program, whose runs begin before the steps that they belong to."""
        self._standing.update(dict.fromkeys(names))

    def initialize(self, initializers: Mapping[str, str]) -> None:
        """Adds nodes that run once, before the first step, under keys that are the same in all programs."""
        self._initializers.update(initializers)

    def replace_target(self, old: str, new: Iterable[str]) -> None:
        """Replaces the target `old` by the nodes `new`."""
        self.replace_targets({old: tuple(new)})

    def replace_targets(self, instead: Mapping[str, Sequence[str]]) -> None:
        """Applies `replace_target` to each item in order, in one pass over all targets."""
        following: dict[str, tuple[str, ...]] = {}
        for old, names in reversed(list(instead.items())):
            following[old] = tuple(name for new in names for name in following.get(new, (new,)))
        for roots in self._all_roots:
            if not following.keys().isdisjoint(roots):
                followed = [name for root in roots for name in following.get(root, (root,))]
                roots.clear()
                roots.update(dict.fromkeys(followed))

    def drop_targets(self, names: Iterable[str]) -> None:
        """Removes nodes from all targets; they still run if another node needs them."""
        for name in names:
            for roots in self._all_roots:
                roots.pop(name, None)

    # -- inside ----------------------------------------------------------------------------------------------------

    @property
    def _all_roots(self) -> list[dict[str, None]]:
        return [self._targets, self._background, self._standing, *(nodes for _, nodes in self._outer.values())]

    def _with_roots(self, changes: Mapping[str, Any]) -> Phase_co:
        return replace(
            self._step,
            outputs=self._outputs,
            targets=tuple(self._targets),
            background_nodes=tuple(self._background),
            standing_nodes=tuple(self._standing),
            outer_steps={key: replace(one, nodes=tuple(nodes)) for key, (one, nodes) in self._outer.items()},
            initializers=self._initializers,
            noted=self._known(),
            **changes,
        )

    def _noted(self, name: str) -> tf.TensorSpec:
        return self._specs[name] if name in self._specs else self._step.noted(name)

    def _known(self) -> SpecOf:
        before, since = self._step.noted, dict(self._specs)
        return (lambda name: since[name] if name in since else before(name)) if since else before
