"""Gathers the parameters of each layer shortly before it computes, and again before its backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from autodist.graph.control_flow import find_maybe_dead
from autodist.graph.find_stages import find_stages, nodes_for
from autodist.graph.names import data_renamed, node_of
from autodist.graph.op_types import types_of_outputs
from autodist.graph.ops import Trait, having
from autodist.graph.parameter_uses import ParameterUses
from autodist.graph.recomputation import Recomputation, backward_passes, find_recomputations
from autodist.graph.seeds import live_calls
from autodist.graph.step import PlacedStep
from autodist.graph.step_editor import StepEditor
from autodist.graph.walks import reach
from autodist.kernels.base import Context, Kernel

GATHER = "_autodist_gather"
"""Attribute of a read: the number of the gather that it belongs to. Copies of a node keep it."""

_AGAIN = "autodist/gathered_again/"


def gathered_again(name: str) -> str:
    """Returns the name of the node for the backward pass that reads or derives parameters as node `name` does.

    >>> gathered_again("dense/MatMul/ReadVariableOp")
    'autodist/gathered_again/dense/MatMul/ReadVariableOp'
    """
    return _AGAIN + name


_READS = having(Trait.READ) - having(Trait.NOT_IN_XLA)
"""Ops that read a complete variable."""


@dataclass(frozen=True)
class GatherLayers(Kernel[PlacedStep, PlacedStep]):
    """Makes reads of a layer's parameters wait until shortly before it computes, and again before its backward pass.

    TensorFlow runs whatever is ready, so it would read all parameters at the start of the step. The read of a layer
    waits for the output of the layer before it, or the one before that if a layer is prefetched. The backward pass
    reads the layer again, once the cotangent has left the layer after it and the gradients of that layer are computed.
    So no layer is kept from the forward to the backward pass. The last layer is not read again.

        v → f → … → b(v) → update(v)    becomes    gate → v → f → …,  gate' → v' → b(v') → update(v)

    Parameters of the nodes that `recompute-blocks` copies are read again as well, for the copies. Slots are read once
    the gradient is there.

    Tables that are looked up are not affected, nor are variables that a loop or a branch takes by their handles. If a
    step computes gradients several times, reads do not wait, and are not repeated.
    """

    name: ClassVar[str] = "gather-layers"
    after: ClassVar[Mapping[str, str]] = {
        "assign-owners": "it gathers variables that have owners",
    }

    def apply(self, step: PlacedStep, context: Context) -> PlacedStep:
        by_name = step.by_name
        layers = {
            by_name[name].handle: one.layer for name, one in step.holders.items() if one.layer and name in by_name
        }
        return _Gathers(step, layers, context).run() if layers else step


@dataclass(frozen=True)
class _Gather:
    """Reads of one layer's parameters that wait for the same nodes.

    Attributes:
        unit: the position of the layer's use in the order of use.
        is_again: True if it is for the backward pass.
    """

    unit: int
    is_again: bool = False


class _Gathers:
    """Implements one `GatherLayers.apply`.

    A *unit* is one use of a layer in the forward pass. A layer that is applied several times has several units.
    """

    def __init__(self, step: PlacedStep, layers: Mapping[str, int], context: Context) -> None:
        self._step, self._layers, self._context = step, layers, context
        self._graph_index = step.graph_index
        self._stages = find_stages(step)
        self._editor = StepEditor(step)
        writes = [name for name, effect in self._stages.effects.items() if effect.writes & layers.keys()]
        late = reach(writes, self._graph_index.consumers.__getitem__)
        outside = late.union(self._stages.once)
        self._compute = [name for name in self._graph_index.order if name not in outside]
        self._maybe_dead = find_maybe_dead(self._graph_index)
        reads = {name: handle for name in self._compute if (handle := self._read_handle(name))}
        self._uses = ParameterUses(self._graph_index, reads, without={*self._stages.once, *self._after_loss})
        self._reads = {name: handle for name, handle in reads.items() if name in self._uses.first}

    def run(self) -> PlacedStep:
        gathers = [_Gather(unit) for unit in range(len(self._units))]
        again: dict[str, str] = {}
        ends: list[list[str]] = []
        if self._is_simple:
            again = self._read_again()
            gathers += [_Gather(unit, is_again=True) for unit in reversed(range(len(self._units)))]
            ends = [self._ends(gather) for gather in gathers]
        for number, gather in enumerate(gathers):
            before = number - 1 - self._context.plan.prefetch
            gate = next((end for end in reversed(ends[: max(before + 1, 0)]) if end), [])
            for read in self._units[gather.unit]:
                name = again.get(read) if gather.is_again else read
                if name is not None:
                    self._editor.add_control(name, gate)
                    self._editor[name].attr[GATHER].i = number
        if self._is_simple:
            self._read_slots_late()
        return self._editor.to_step()

    # -- analysis --------------------------------------------------------------------------------------------------

    def _read_handle(self, name: str) -> str | None:
        """Returns the handle of the gathered variable that a node reads whole; None if it reads none."""
        node = self._graph_index.nodes[name]
        handle = node_of(node.input[0]) if node.op in _READS else None
        return handle if handle in self._layers and name not in self._maybe_dead else None

    @cached_property
    def _units(self) -> list[list[str]]:
        """The reads of each unit, in the order of use."""
        times: dict[str, int] = {}
        units: dict[tuple[int, int], list[str]] = {}
        for read in sorted(self._reads, key=self._uses.first.__getitem__):
            handle = self._reads[read]
            times[handle] = times.get(handle, -1) + 1
            units.setdefault((self._layers[handle], times[handle]), []).append(read)
        return list(units.values())

    @cached_property
    def _unit_of(self) -> dict[str, int]:
        return {read: unit for unit, reads in enumerate(self._units) for read in reads}

    @cached_property
    def _calls(self) -> list[int]:
        return live_calls(self._step)

    @property
    def _is_simple(self) -> bool:
        """True if the step computes gradients at most once."""
        return len(self._calls) < 2 and max(self._stages.level, default=1) == 1

    @cached_property
    def _after_loss(self) -> set[str]:
        """The nodes that depend on the seed of the loss: the backward pass and the updates."""
        seeds = [seed for k in self._calls for seed in self._step.gradient_calls[k].seeds]
        return reach([s for s in seeds if s in self._graph_index.nodes], self._graph_index.consumers.__getitem__)

    @cached_property
    def _backward(self) -> list[str]:
        """The nodes of the backward pass."""
        return [name for name in self._compute if name in self._after_loss]

    @cached_property
    def _recomputations(self) -> list[Recomputation]:
        """The nodes that the backward pass computes again, for a step that computes gradients once."""
        blocks = self._context.plan.recomputed_blocks
        if not (blocks and self._is_simple and self._calls):
            return []
        [backward] = backward_passes(self._step)
        own = {name: name for name in self._graph_index.nodes}
        return find_recomputations(self._step, blocks, backward, own)

    @cached_property
    def _recomputed_for(self) -> dict[str, set[int]]:
        """Maps each backward node that reads copies of forward nodes to the units whose parameters the copies read."""
        found: dict[str, set[int]] = {}
        for one in self._recomputations:
            units = {unit for source in self._parameters_of(one) for unit in self._units_of(source)}
            for reader in one.readers:
                found.setdefault(reader, set()).update(units)
        return found

    def _parameters_of(self, one: Recomputation) -> list[str]:
        """Returns the nodes, derived from parameters alone, that the other nodes of a recomputation read."""
        nodes = (name for name in one.nodes if name not in self._uses.derived)
        return list(dict.fromkeys(s for name in nodes for s in self._graph_index.data[name] if s in self._uses.derived))

    @cached_property
    def _last_used(self) -> dict[str, int]:
        """Maps each forward node that depends on gathered parameters to the last unit that it depends on."""
        found: dict[str, int] = {}
        for name in self._graph_index.order:
            if name not in self._after_loss:
                units = [found[source] for source in self._graph_index.sources[name] if source in found]
                units += [self._unit_of[name]] if name in self._unit_of else []
                if units:
                    found[name] = max(units)
        return found

    @cached_property
    def _first_used(self) -> dict[str, int]:
        """Maps each backward node to the first unit whose parameters the cotangents before it were computed from."""
        found: dict[str, int] = {}
        for name in self._graph_index.order:
            if name in self._after_loss:
                units = [found[source] for source in self._graph_index.sources[name] if source in found]
                units += [unit for source in self._graph_index.data[name] for unit in self._units_of(source)]
                units += self._recomputed_for.get(name, ())
                found[name] = min(units, default=len(self._units))
        return found

    def _units_of(self, name: str) -> set[int]:
        """Returns the units whose parameters a node is derived from; empty if it depends on anything else."""
        return {self._unit_of[read] for read in self._uses.derived.get(name, ()) if read in self._unit_of}

    # -- gates -----------------------------------------------------------------------------------------------------

    def _ends(self, gather: _Gather) -> list[str]:
        """Returns the last nodes of a layer's forward or backward pass, which read its gathered parameters."""
        if gather.is_again:
            return [*self._outputs(self._first_used, gather.unit), *self._gradients(gather.unit)]
        if gather.unit == len(self._units) - 1:
            targets = [node_of(t) for k in self._calls for t in self._step.gradient_calls[k].targets]
            return [name for name in targets if name in self._last_used and name in self._gates]
        return self._outputs(self._last_used, gather.unit)

    def _outputs(self, unit_of: Mapping[str, int], unit: int) -> list[str]:
        """Returns the nodes of a unit that nodes of another unit read, besides those derived from parameters alone."""
        return [
            name for name, own in unit_of.items()
            if own == unit and name in self._gates
            and any(unit_of.get(consumer, unit) != unit for consumer in self._graph_index.readers(name))
        ]  # fmt: skip

    @cached_property
    def _gates(self) -> set[str]:
        """The nodes that reads may wait for."""
        return {name for name in self._compute if name not in self._uses.derived and name not in self._maybe_dead}

    def _gradients(self, unit: int) -> list[str]:
        """Returns the nodes of the gradients of a unit's parameters that need no parameters of earlier units."""
        handles = {self._reads[read] for read in self._units[unit]}
        of_unit = [g for g in self._stages.gradients if self._step.by_name[g.variable].handle in handles]
        tensors = [t for gradient in of_unit for t in gradient.tensors]
        return [
            name for name in map(node_of, tensors) if self._first_used.get(name, -1) >= unit and name in self._gates
        ]

    # -- updates ---------------------------------------------------------------------------------------------------

    def _read_slots_late(self) -> None:
        """Makes reads that updates alone need wait for a gradient that they are combined with.

        A product such as `momentum * m` depends on no gradient. Without this, the step would compute all of them at its
        start, and keep them until the gradients are there.
        """
        once, data = self._stages.once, self._graph_index.data
        of = {node_of(t): node_of(t) for gradient in self._stages.gradients for t in gradient.tensors}
        compute = reach(of, data.__getitem__)
        early = nodes_for(self._step, once).keys() - once - compute
        seen: set[str] = set()
        for name in sorted(once, key=self._stages.order.__getitem__):
            gradient = next((of[source] for source in data[name] if source in of), None)
            found = reach(early.intersection(data[name]), lambda n: early.intersection(data[n])) - seen
            seen |= found
            if gradient is None:
                continue
            of[name] = gradient
            for read in sorted(found, key=self._stages.order.__getitem__):
                is_tensor = self._graph_index.nodes[read].op in _READS and self._step.spec_of(f"{read}:0").shape.rank
                if is_tensor and gradient not in self._maybe_dead:
                    self._editor.add_control(read, [gradient])

    # -- reads for the backward pass -------------------------------------------------------------------------------

    def _read_again(self) -> dict[str, str]:
        """Makes backward nodes use new reads of the parameters; returns the new read of each read."""
        readers = [name for name in self._backward if any(map(self._is_read_again, self._graph_index.data[name]))]
        read = {source for name in readers for source in self._graph_index.data[name]}
        read |= {source for one in self._recomputations for source in self._parameters_of(one)}
        needed = reach(
            filter(self._is_read_again, read), lambda name: filter(self._is_read_again, self._graph_index.data[name])
        )
        names = [name for name in self._graph_index.order if name in needed]
        copies = self._editor.clone(names, _AGAIN)
        self._editor.note(
            {
                f"{copies[name]}:{k}": self._step.spec_of(f"{name}:{k}")
                for name in names
                for k, _ in enumerate(types_of_outputs(self._graph_index.nodes[name]))
            }
        )
        for name in readers:
            self._editor.set_inputs(name, data_renamed(self._editor[name].input, copies))
        for one in self._recomputations:  # until `recompute-blocks`, nothing else may need what its copies will read
            needed_later = [copies[source] for source in self._parameters_of(one) if source in copies]
            for name in one.readers:
                self._editor.add_control(name, needed_later)
        again = {name: copies[name] for name in names if name in self._reads}
        self._write_after(again)
        return again

    def _is_read_again(self, name: str) -> bool:
        """Returns True if a node is derived from parameters that do not all belong to the last unit."""
        return bool(self._units_of(name) - {len(self._units) - 1})

    def _write_after(self, again: Mapping[str, str]) -> None:
        """Makes the writes of variables wait for the new reads, as they wait for the original ones."""
        by_handle: dict[str, list[str]] = {}
        for read, copy in again.items():
            by_handle.setdefault(self._reads[read], []).append(copy)
        for name, effect in self._stages.effects.items():
            for handle in sorted(effect.writes & by_handle.keys()):
                self._editor.add_control(name, by_handle[handle])
