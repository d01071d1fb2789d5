"""The arguments of a step: their parameters, and the arrays among them with their batch axes."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import function_type_utils  # tf.function binds arguments by it
from tensorflow.python.framework.composite_tensor import CompositeTensor  # the parent of composites of libraries
from tensorflow.python.framework.type_spec import BatchableTypeSpec  # the specs of those that hold a batch
from tensorflow.python.util import nest  # tf.nest, with the path of each leaf

from autodist.batch.axis import axis_within, is_array, matching_key, name_by_path, require_axis, require_mapping
from autodist.batch.composite_rows import CompositeRows, open_spec, rows_of
from autodist.batch.examples import group_rows
from autodist.errors import CaptureError

COMPOSITES = (tf.SparseTensor, tf.RaggedTensor, tf.IndexedSlices)

_Passed = tuple[str, Any, Any, str]
"""A parameter, a leaf of its argument, the declared spec of the leaf or None, and the leaf's name."""

Constants = Sequence[tuple[str, Any]]
"""By parameter, the leaves of the arguments, with None in place of arrays."""


@dataclass(frozen=True)
class Leaf:
    """One array or tensor among the arguments of a step.

    Attributes:
        parameter: name of the parameter.
        value: the array.
        axis: the batch axis; None if every replica gets the whole array.
        declared: shape and dtype in the script's `input_signature`; None without one.
        name: name of the leaf in `batch_axis`.
        is_padded: True if the array comes from a sparse or ragged tensor, with rows padded to the longest.
    """

    parameter: str
    value: Any
    axis: int | None
    declared: tf.TensorSpec | None = None
    name: str = ""
    is_padded: bool = False

    @property
    def rows(self) -> int:
        """Number of rows along its batch axis; 0 without one."""
        return 0 if self.axis is None else int(np.shape(self.value)[self.axis])

    @property
    def spec(self) -> tf.TensorSpec:
        """Its dtype and shape, unknown along the batch axis."""
        shape: Sequence[int | None] = np.shape(self.value)
        if self.declared is not None:
            known = self.declared.shape
            shape = [None] * len(shape) if known.rank is None else known.as_list()
        return tf.TensorSpec([None if a == self.axis else n for a, n in enumerate(shape)], self.value.dtype)


class StepArguments:
    """Extracts the arrays from the arguments of a step.

    Arrays and tensors of rank 1 and more are split along their first axis, sparse and ragged tensors by example.
    Scalars are passed whole to every replica. All other arguments are constants of the step.

    Args:
        name: name of the step.
        function: the step.
        plain: the step as a `tf.function`.
        input_signature: shapes and dtypes of all arguments, as for `tf.function`; None: those of each call.
        batch_axis: by parameter, or by name of a leaf, the axis to split, negative ones counted from the last; None:
            every replica gets the whole array.
        name_of: returns the name of a leaf in `batch_axis`, from its parameter and its path in the argument.

    Raises:
        CaptureError: `batch_axis` names a parameter that does not exist, or an axis that is not an integer.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        plain: Any,
        input_signature: Any,
        batch_axis: Mapping[str, int | None] | None,
        name_of: Callable[[str, Sequence[Any]], str],
    ) -> None:
        self._name, self._plain, self._name_of = name, plain, name_of
        self._input_signature = input_signature
        self._signature = inspect.signature(function)
        self._groups: dict[tuple[str, ...], tuple[int, ...]] = {}
        named = require_mapping(batch_axis, "parameters")
        unknown = {key for key in named if str(key).split("/")[0] not in self._signature.parameters}
        if unknown and name_of is name_by_path:
            raise CaptureError(
                f"batch_axis names {', '.join(sorted(map(str, unknown)))}, and {name} has the parameters "
                f"{', '.join(self._signature.parameters)}."
            )
        self._batch_axis = {key: require_axis(axis, f"{key} of {name}") for key, axis in named.items()}
        self._names_leaves = name_of is not name_by_path or any("/" in key for key in self._batch_axis)

    @functools.cached_property
    def _declared(self) -> Mapping[str, Any] | None:
        """The `input_signature` by parameter. It excludes `self`, so a method's must be read after it is bound."""
        signature = self._input_signature
        return None if signature is None else self._signature.bind(*signature).arguments

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments by parameter, cast to the input signature if there is one.

        Raises:
            TypeError: TensorFlow's: arguments do not match the signature.
        """
        if self._declared is None:
            return dict(self._signature.bind(*args, **kwargs).arguments)
        plain = self._plain
        bound = function_type_utils.bind_function_inputs(args, kwargs, plain.function_type, plain._default_values)
        return dict(bound.arguments)

    def call(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Calls the step with arguments by parameter."""
        bound = self._signature.bind_partial()
        bound.arguments.update(arguments)
        return function(*bound.args, **bound.kwargs)

    def flatten(self, arguments: Mapping[str, Any]) -> tuple[list[Leaf], Constants]:
        """Returns the arrays among the arguments, and all leaves with None in their places.

        Raises:
            CaptureError: an argument cannot be split, or `batch_axis` names an argument that is not passed.
        """
        flat = [passed for p, value in arguments.items() for passed in self._flatten(p, value)]
        if self._names_leaves:
            self._require_named(name for *_, name in flat)
        padded = self._padded(flat)
        leaves = [
            Leaf(p, v, self.axis(p, v, name), spec, name, at in padded)
            for at, (p, v, spec, name) in enumerate(flat)
            if is_array(v)
        ]
        return leaves, [(p, None if is_array(v) else v) for p, v, *_ in flat]

    def _padded(self, flat: Sequence[_Passed]) -> set[int]:
        """Returns the positions of the arrays of sparse and ragged tensors."""
        starts = [(at, value) for at, (_, value, *_) in enumerate(flat) if isinstance(value, CompositeRows)]
        return {at + 1 + k for at, rows in starts for k in range(rows.arrays_per_tensor)}

    def unflatten(self, arguments: Mapping[str, Any], tensors: Iterable[tf.Tensor]) -> dict[str, Any]:
        """Returns the arguments with tensors in place of the arrays, in the order of `flatten`."""
        remaining = iter(tensors)

        def taken(parameter: str, value: Any) -> Any:
            if isinstance(value, COMPOSITES):
                rows = self._rows_of(parameter, value)
                return rows.tensor(*itertools.islice(remaining, rows.arrays_per_tensor))
            return next(remaining) if is_array(value) else value

        return {  # separately; a nest of all would sort them by name
            name: tf.nest.map_structure(functools.partial(taken, name), value, expand_composites=self._is_whole(name))
            for name, value in arguments.items()
        }

    def axis(self, parameter: str, value: Any, name: str) -> int | None:
        """Returns the batch axis of a leaf.

        Raises:
            CaptureError: the leaf has no such axis.
        """
        key = matching_key(self._batch_axis, name)
        if key is None:
            return 0 if np.ndim(value) else None
        axis = self._batch_axis[key]
        label = parameter if name == parameter else name
        return None if axis is None else axis_within(axis, np.ndim(value), f"{label} of {self._name}")

    def axis_at(self, parameter: str, path: Sequence[Any], value: Any) -> int | None:
        """Returns the batch axis of the leaf at a path in an argument."""
        return self.axis(parameter, value, self._name_of(parameter, path))

    def group(self, leaves: Sequence[Leaf]) -> tuple[int, ...]:
        """Returns the group of each array with a batch axis; a group's arrays had equally many rows in all calls."""
        split = [leaf for leaf in leaves if leaf.axis is not None]
        key = tuple(leaf.parameter for leaf in split)
        self._groups[key] = group_rows([leaf.rows for leaf in split], self._groups.get(key))
        return self._groups[key]

    def _flatten(self, parameter: str, value: Any) -> Iterator[_Passed]:
        """Yields the leaves of an argument; for a sparse or ragged tensor, its conversion and its arrays.

        Raises:
            CaptureError: a sparse or ragged tensor cannot be split.
        """
        is_whole = self._is_whole(parameter)
        declared: Iterable[Any] = itertools.repeat(None)
        if self._declared is not None and parameter in self._declared:
            declared = tf.nest.flatten(self._declared[parameter], expand_composites=is_whole)
        leaves = nest.flatten_with_tuple_paths(value, expand_composites=is_whole)
        for (path, leaf), spec in zip(leaves, declared, strict=False):
            name = self._name_of(parameter, path)
            if isinstance(leaf, COMPOSITES) or _is_batch(leaf):
                if self._is_whole(name):
                    raise CaptureError(
                        f"batch_axis of {name} is None, and {name} of {self._name} is a {type(leaf).__name__} among "
                        "others; pass it dense."
                    )
                rows = self._rows_of(parameter, leaf)
                yield parameter, rows, None, name
                yield from ((parameter, array, open_spec(array), name) for array in rows.arrays(leaf))
            else:
                yield parameter, leaf, spec, name

    def _rows_of(self, parameter: str, composite: Any) -> CompositeRows:
        return rows_of(composite, self._batch_axis.get(parameter, 0), f"{parameter} of {self._name}")

    def _is_whole(self, name: str) -> bool:
        key = matching_key(self._batch_axis, name)
        return key is not None and self._batch_axis[key] is None

    def _require_named(self, names: Iterable[str]) -> None:
        """Checks that each key of `batch_axis` is the name of a leaf, or a prefix of the names of several leaves.

        Raises:
            CaptureError: a key is neither; the message lists the names.
        """
        present = list(dict.fromkeys(names))
        for key in self._batch_axis:
            if not any(f"{name}/".startswith(f"{key}/") for name in present):
                raise CaptureError(f"batch_axis names {key}, and {self._name} has the arguments {', '.join(present)}.")


def _is_batch(value: Any) -> bool:
    """Returns True for a library's composite tensor that holds a batch, such as the graphs of tensorflow-gnn."""
    is_composite = isinstance(value, CompositeTensor) and not isinstance(value, tf.Variable)
    return is_composite and isinstance(value._type_spec, BatchableTypeSpec)


def count_examples(leaves: Sequence[Leaf]) -> int:
    """Returns the number of examples of a call: the rows of the first array with a batch axis; 0 if there is none."""
    return next((leaf.rows for leaf in leaves if leaf.axis is not None), 0)


def split_rows(leaves: Sequence[Leaf]) -> list[tuple[str, int]]:
    """Returns name and number of rows of each array with a batch axis."""
    return [(leaf.name, leaf.rows) for leaf in leaves if leaf.axis is not None]


def inputs_apart(inputs: Sequence[str], leaves: Sequence[Leaf], groups: Sequence[int]) -> dict[str, str]:
    """Returns inputs with another number of rows than the first; maps each to the first input of the same number."""
    split = [name for name, leaf in zip(inputs, leaves, strict=True) if leaf.axis is not None]
    first: dict[int, str] = {}
    for group, name in zip(groups, split, strict=True):
        first.setdefault(group, name)
    return {name: first[group] for name, group in zip(split, groups, strict=True) if group}
