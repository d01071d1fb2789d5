"""Whole copies of divided variables, for nodes that take a handle and need the whole variable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import tensorflow as tf

from autodist.errors import StrategyError
from autodist.graph.effects import Effects
from autodist.graph.names import as_input, data_inputs, is_control, node_of, tensor
from autodist.graph.ops import Trait, having
from autodist.graph.parts import Variable
from autodist.graph.step import PlacedStep
from autodist.graph.step_editor import StepEditor
from autodist.graph.walks import writes_before
from autodist.kernels.place.copies import add_copy, read_before, refresh_copy, take_fresh, wait_for

_OLD_FLOW = having(Trait.ENTER | Trait.SWITCH)
_SUFFIX = "/whole"

Change = Callable[[str, Variable], str]
"""Gathers the part of a variable that a place holds, or takes the part of its whole value."""


@dataclass
class WholeCopies:
    """Copies of divided variables, each on one place.

        loop(v)    becomes    v/whole ← all_gather(v);  loop(v/whole);  v ← slice(v/whole)

    The last write is there only if the node writes the variable. A value of the variable is gathered once for all nodes
    that take it.

    Attributes:
        step: the step before it is divided.
        editor: the editor of its graph.
        gather: returns the whole value of a variable, from a read of a place's part.
        divide: returns a place's part of a variable, from its whole value.
        variables: the copies.
    """

    step: PlacedStep
    editor: StepEditor[PlacedStep]
    gather: Change
    divide: Change
    variables: list[Variable] = field(default_factory=list)
    _written: dict[str, list[str]] = field(default_factory=dict)
    _fresh: dict[tuple[str, ...], str] = field(default_factory=dict)
    _reads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._effects = Effects(self.step.graph_def, self.step.graph_index.nodes)

    def use(self, name: str, variable: Variable) -> None:
        """Makes a node take a whole copy of a variable, and writes its result back.

        Raises:
            StrategyError: control flow of TensorFlow 1 takes the variable.
        """
        node = self.step.graph_index.nodes[name]
        if node.op == "VarIsInitializedOp":  # a part has a value if the variable has one
            return
        if node.op in _OLD_FLOW:
            raise StrategyError(
                f"{variable.name} is sharded, and {node.op} ({name}) takes it into a loop or a branch of TensorFlow "
                "1's control flow. Do not shard it, or use the control flow of TensorFlow 2 "
                "(tf.compat.v1.enable_control_flow_v2())."
            )
        if node.op == "VariableShape":
            self._make_constant(name, variable)
            return
        if node.op == "ResourceGatherNd":
            self._gather_from_value(name, variable)
            return
        copy = self._copy_of(variable)
        taken = [i for i in data_inputs(node) if self._effects.handle_of(i) == variable.handle]
        version = variable.handle, *self._writes_before(name, variable)
        if version not in self._fresh:
            self._fresh[version] = refresh_copy(self.editor, copy.handle, node_of(self._value_for(name, variable)))
        take_fresh(self.editor, [name], taken, self._fresh[version])
        if variable.handle in self._effects.of(node).writes:
            self._written.setdefault(name, []).append(self._write_back(name, variable, copy, self._fresh[version]))

    def order(self) -> None:
        """Orders successors of nodes that write copies, and reads for later copies, after the writes of variables."""
        following = {name: (name, *writes) for name, writes in self._written.items()}
        for name, nodes in following.items():
            self.editor.replace_control(name, nodes, [*self.step.graph_index.consumers[name], *self._reads])
            self.editor.write_before_reads(name, self._written[name], self.step.graph_index.readers(name))
        self.editor.replace_targets(following)

    def _value_for(self, name: str, variable: Variable) -> str:
        """Returns the whole value that a variable has when a node runs."""
        label = f"{variable.handle}{_SUFFIX}/for/{name}"
        writes = self._writes_before(name, variable)
        self._reads.append(read_before(self.editor, name, variable, label, writes=writes))
        return self.gather(tensor(self._reads[-1]), variable)

    def _make_constant(self, name: str, variable: Variable) -> None:
        """Replaces the query of a variable's shape by the whole shape."""
        node = self.editor[name]
        dtype = node.attr["out_type"].type
        self.editor.set_inputs(name, list(filter(is_control, node.input)))
        node.op = "Const"
        node.attr.pop("out_type")
        node.attr["dtype"].type = dtype
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(variable.shape, dtype, [len(variable.shape)]))

    def _gather_from_value(self, name: str, variable: Variable) -> None:
        """Makes a gather of single elements read the whole value, without a copy."""
        node = self.editor[name]
        _, places, *waits = node.input
        self.editor.set_inputs(name, [as_input(self._value_for(name, variable)), places, *waits])
        node.op = "GatherNd"
        node.attr["Tparams"].CopyFrom(node.attr.pop("dtype"))

    def _writes_before(self, name: str, variable: Variable) -> list[str]:
        return writes_before(self.step.graph_index, name, variable.handle)

    def _copy_of(self, variable: Variable) -> Variable:
        copy = replace(variable, name=f"{variable.name}{_SUFFIX}", handle=f"{variable.handle}{_SUFFIX}")
        if copy.handle not in self.editor:
            self.variables.append(copy)
            add_copy(self.editor, variable, copy.handle, _SUFFIX)
        return copy

    def _write_back(self, name: str, variable: Variable, copy: Variable, fresh: str) -> str:
        """Writes a node's new value of a copy to the variable; returns the write.

        It reads the copy by the handle after the refresh: what waits for a conditional does not wait for the inputs of
        the branch that was not taken.
        """
        waits, dtype = [f"^{one}" for one in wait_for(self.editor, name)], variable.dtype
        read = self.editor.add_op("ReadVariableOp", f"{copy.handle}/after/{name}", [fresh, *waits], dtype)
        inputs = [variable.handle, self.divide(tensor(read), variable)]
        return self.editor.add_op("AssignVariableOp", f"{copy.handle}/from/{name}", inputs, dtype)
