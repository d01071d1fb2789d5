"""LoopEditor: changes the variables of a `While`, and the functions that it calls."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections import Counter
from typing import Any

import tensorflow as tf

from autodist.graph.editor import GraphEditor, NodeDef
from autodist.graph.functions import add_function, functions_by_name
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.op_types import spelled_outputs, types_of_outputs


class LoopEditor:
    """A `While` or `StatelessWhile` under modification.

    A loop variable is an argument of the body and the result that the next iteration gets for it. A tensor of the body
    is spelled as in a FunctionDef: "argument", or "node:output:0".

    Other loops may call the same functions, so the editor changes copies; `finish` makes the loop call these.

    Attributes:
        node: of the loop.
    """

    def __init__(self, editor: GraphEditor, name: str) -> None:
        self.node = editor[name]
        self._editor = editor
        self._body, self._condition = self._copy("body"), self._copy("cond")
        self._nodes = {node.name: node for node in self._body.node_def}
        read = [node_of(spelled) for node in self._body.node_def for spelled in node.input]
        self._reads = Counter([*read, *map(node_of, self._body.ret.values())])
        self._tested = {node_of(spelled) for node in self._condition.node_def for spelled in node.input}
        self._tested |= set(map(node_of, self._condition.ret.values()))

    def _copy(self, role: str) -> Any:
        called = self.node.attr[role].func.name
        return copy.deepcopy(functions_by_name(self._editor.library)[called])

    # -- lookup ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Returns the number of variables."""
        return len(self._body.signature.input_arg)

    def of_op(self, op: str) -> list[NodeDef]:
        """Returns the nodes of the body with an op."""
        return [node for node in self._body.node_def if node.op == op]

    def readers(self, spelled: str) -> list[NodeDef]:
        """Returns the nodes of the body that read an output of the node, or the variable, that a tensor belongs to."""
        name = node_of(spelled)
        return [node for node in self._body.node_def if any(node_of(i) == name for i in node.input)]

    @functools.cached_property
    def constants(self) -> dict[str, str]:
        """The variables that keep their value: the tensor of the graph for each of the body."""
        kept = (k for k in range(len(self)) if self.source(self.result(k)) == self.inside(k))
        return {self.inside(k): self.before(k) for k in kept}

    def before(self, variable: int) -> str:
        """Returns a variable's value before the loop, a tensor of the graph."""
        return tensor([spelled for spelled in self.node.input if not is_control(spelled)][variable])

    def variable_of(self, spelled: str) -> int | None:
        """Returns the number of the variable that is a tensor of the body; None if there is none."""
        return next((k for k in range(len(self)) if self.inside(k) == spelled), None)

    def type_of(self, spelled: str) -> int:
        """Returns the dtype of a tensor of the body, as in a NodeDef."""
        variable, node = self.variable_of(spelled), self.producer(spelled)
        if node is None:
            assert variable is not None, spelled
            return int(self._body.signature.input_arg[variable].type)
        _, output, index = spelled.split(":")
        return list(types_of_outputs(node))[spelled_outputs(node).index(f"{output}:{index}")]

    def inside(self, variable: int) -> str:
        """Returns a variable's value at the start of an iteration, a tensor of the body."""
        return str(self._body.signature.input_arg[variable].name)

    def after(self, variable: int) -> str:
        """Returns a variable's value after the loop, a tensor of the graph."""
        return f"{self.node.name}:{variable}"

    def result(self, variable: int) -> str:
        """Returns a variable's value for the next iteration, a tensor of the body."""
        return str(self._body.ret[self._body.signature.output_arg[variable].name])

    def source(self, spelled: str, *, is_moved: bool = False) -> str:
        """Returns the tensor of the body of which a tensor is a copy by `Identity`, or itself.

        Args:
            spelled: the tensor.
            is_moved: stop at a copy that more than one node or result reads.
        """
        node = self.producer(spelled)
        while node is not None and node.op == "Identity" and (not is_moved or self.is_read_once(spelled)):
            spelled = node.input[0]
            node = self.producer(spelled)
        return spelled

    def producer(self, spelled: str) -> NodeDef | None:
        """Returns the node that computes a tensor of the body; None for a variable at the start of an iteration."""
        return self._nodes.get(node_of(spelled))

    def is_read_once(self, spelled: str) -> bool:
        """Returns True if one node or result of the body reads the node or variable that a tensor belongs to."""
        return self._reads[node_of(spelled)] == 1

    def is_tested(self, variable: int) -> bool:
        """Returns True if the condition of the loop depends on a variable."""
        return self._condition.signature.input_arg[variable].name in self._tested

    # -- changes ---------------------------------------------------------------------------------------------------

    def add(self, node: NodeDef) -> NodeDef:
        """Adds a node to the body."""
        added: NodeDef = self._body.node_def.add()
        added.CopyFrom(node)
        self._nodes[added.name] = added
        return added

    def replace(self, name: str, spelled: str) -> None:
        """Replaces a stateless node of the body with one output by a tensor of the body."""
        self.remove(name)
        for node in self._body.node_def:
            if any(node_of(i) == name for i in node.input):
                data = [spelled if node_of(i) == name else i for i in node.input if not is_control(i)]
                node.input[:] = [*data, *(i for i in node.input if is_control(i) and node_of(i) != name)]
        for output, result in self._body.ret.items():
            self._body.ret[output] = spelled if node_of(result) == name else result

    def remove(self, name: str) -> None:
        """Removes a node from the body that no other reads."""
        self._body.node_def.remove(self._nodes.pop(name))

    def set_result(self, variable: int, spelled: str) -> None:
        """Sets the value of a variable for the next iteration."""
        self._body.ret[self._body.signature.output_arg[variable].name] = spelled

    def add_variable(self, before: str, dtype: tf.DType, shape: tf.TensorShape) -> int:
        """Adds a variable that keeps its value, unless `set_result` changes that; returns its number."""
        name = f"autodist_{len(self)}"
        for function in (self._body, self._condition):
            function.signature.input_arg.add(name=name, type=dtype.as_datatype_enum)
            function.attr.pop("_input_shapes", None)
        self._body.signature.output_arg.add(name=f"{name}_result", type=dtype.as_datatype_enum)
        self._body.ret[f"{name}_result"] = name
        self.node.attr["T"].list.type.append(dtype.as_datatype_enum)
        if self.node.attr["output_shapes"].list.shape:
            self.node.attr["output_shapes"].list.shape.append(shape.as_proto())
        data = [spelled for spelled in self.node.input if not is_control(spelled)]
        self._editor.set_inputs(self.node.name, [*data, before, *filter(is_control, self.node.input)])
        return len(self) - 1

    def finish(self) -> None:
        """Makes the loop call the changed functions."""
        for role, function in (("body", self._body), ("cond", self._condition)):
            content = hashlib.sha256(function.SerializeToString(deterministic=True)).hexdigest()
            function.signature.name = f"{function.signature.name}_{content[:16]}"
            add_function(self._editor.library, function)
            self.node.attr[role].func.name = function.signature.name
