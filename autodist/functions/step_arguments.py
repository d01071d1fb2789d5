"""The arguments of a step: by which parameter they come, and which arrays among them are split, along which axis."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import function_type_utils  # by which tf.function takes arguments
from tensorflow.python.util import nest  # tf.nest, with where each leaf stands

from autodist.batch.axis import axis_within, is_array, name_by_path, require_axis, require_mapping, said_of
from autodist.batch.examples import group_rows
from autodist.errors import CaptureError
from autodist.functions.composite_rows import CompositeRows, open_spec, rows_of

COMPOSITES = (tf.SparseTensor, tf.RaggedTensor, tf.IndexedSlices)

_Passed = tuple[str, Any, Any, str]
"""A parameter, a leaf of what is passed for it, what the script declares of that, or None, and what it is called."""

Constants = Sequence[tuple[str, Any]]
"""By parameter, the leaves of the arguments; None in the place of arrays."""


@dataclass(frozen=True)
class Leaf:
    """One array or tensor among the arguments of a step.

    Attributes:
        parameter: name of the parameter that it came in.
        value: the array.
        axis: along which it is split; None: every replica gets the whole.
        declared: its shape and dtype by the script's `input_signature`; None: those of the value.
        name: what `batch_axis` calls it.
        is_padded: its rows are parts of sparse or ragged ones, padded to the longest.
    """

    parameter: str
    value: Any
    axis: int | None
    declared: tf.TensorSpec | None = None
    name: str = ""
    is_padded: bool = False

    @property
    def rows(self) -> int:
        """Along the axis along which it is split."""
        return 0 if self.axis is None else int(np.shape(self.value)[self.axis])

    @property
    def spec(self) -> tf.TensorSpec:
        """Its shape, open along the batch axis, and its dtype."""
        shape: Sequence[int | None] = np.shape(self.value)
        if self.declared is not None:
            known = self.declared.shape
            shape = [None] * len(shape) if known.rank is None else known.as_list()
        return tf.TensorSpec([None if a == self.axis else n for a, n in enumerate(shape)], self.value.dtype)


class StepArguments:
    """Takes the arguments of a step apart.

    Arrays and tensors of rank 1 and more are split along their first axis, sparse and ragged ones by their examples;
    scalars go whole to every replica; all else is part of the step.

    Args:
        name: of the step.
        function: the step.
        plain: the `tf.function` of it.
        input_signature: shapes and dtypes of all arguments, as `tf.function` takes it; None: those that come.
        batch_axis: by parameter, or by what `name_of` calls a leaf, the axis along which it is split, negative ones
            counted from the last; None: every replica gets the whole.
        name_of: what `batch_axis` calls a leaf, by its parameter and its place in what is passed for it.

    Raises:
        CaptureError: `batch_axis` names what is no parameter, or an axis that is no number.
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
        """The `input_signature` by parameter. It names no `self`, so a method's is asked for only once it is bound."""
        signature = self._input_signature
        return None if signature is None else self._signature.bind(*signature).arguments

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by parameter; as the signature has them, where there is one.

        Raises:
            TypeError: TensorFlow's: arguments do not fit the signature.
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

    def take_apart(self, arguments: Mapping[str, Any]) -> tuple[list[Leaf], Constants]:
        """The arrays among the arguments, and all leaves with None in their places.

        Raises:
            CaptureError: an argument cannot be split, or `batch_axis` names what is not passed.
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
        """The places of the arrays of sparse and ragged tensors."""
        starts = [(at, value) for at, (_, value, *_) in enumerate(flat) if isinstance(value, CompositeRows)]
        return {at + 1 + k for at, rows in starts for k in range(rows.arrays_per_tensor)}

    def put_together(self, arguments: Mapping[str, Any], tensors: Iterable[tf.Tensor]) -> dict[str, Any]:
        """The arguments with tensors in the places of arrays, in the order of `take_apart`."""
        remaining = iter(tensors)

        def taken(parameter: str, value: Any) -> Any:
            if isinstance(value, COMPOSITES):
                rows = self._rows_of(parameter, value)
                return rows.tensor(*itertools.islice(remaining, rows.arrays_per_tensor))
            return next(remaining) if is_array(value) else value

        return {  # one by one; a nest of all would sort them by name
            name: tf.nest.map_structure(functools.partial(taken, name), value, expand_composites=self._is_whole(name))
            for name, value in arguments.items()
        }

    def axis(self, parameter: str, value: Any, name: str) -> int | None:
        """Along which a leaf is split.

        Raises:
            CaptureError: it has no such axis.
        """
        key = said_of(self._batch_axis, name)
        if key is None:
            return 0 if np.ndim(value) else None
        axis = self._batch_axis[key]
        told = parameter if name == parameter else name
        return None if axis is None else axis_within(axis, np.ndim(value), f"{told} of {self._name}")

    def axis_at(self, parameter: str, path: Sequence[Any], value: Any) -> int | None:
        """Along which the leaf at a place in an argument is split."""
        return self.axis(parameter, value, self._name_of(parameter, path))

    def group(self, leaves: Sequence[Leaf]) -> tuple[int, ...]:
        """The group of each array that is split; the arrays of one group had equally many rows in all calls so far."""
        split = [leaf for leaf in leaves if leaf.axis is not None]
        key = tuple(leaf.parameter for leaf in split)
        self._groups[key] = group_rows([leaf.rows for leaf in split], self._groups.get(key))
        return self._groups[key]

    def _flatten(self, parameter: str, value: Any) -> Iterator[_Passed]:
        """The leaves of an argument; of a sparse or ragged tensor, what it is made of.

        Raises:
            CaptureError: a sparse or ragged tensor is to be split, and cannot be.
        """
        is_whole = self._is_whole(parameter)
        declared: Iterable[Any] = itertools.repeat(None)
        if self._declared is not None and parameter in self._declared:
            declared = tf.nest.flatten(self._declared[parameter], expand_composites=is_whole)
        found = nest.flatten_with_tuple_paths(value, expand_composites=is_whole)
        for (path, leaf), spec in zip(found, declared, strict=False):
            name = self._name_of(parameter, path)
            if isinstance(leaf, COMPOSITES):
                rows = self._rows_of(parameter, leaf)
                if self._is_whole(name):
                    raise CaptureError(
                        f"batch_axis of {name} is None, and {name} of {self._name} is a {type(leaf).__name__} among "
                        "others; pass it dense."
                    )
                yield parameter, rows, None, name
                yield from ((parameter, array, open_spec(array), name) for array in rows.arrays(leaf))
            else:
                yield parameter, leaf, spec, name

    def _rows_of(self, parameter: str, composite: Any) -> CompositeRows:
        return rows_of(composite, self._batch_axis.get(parameter, 0), f"{parameter} of {self._name}")

    def _is_whole(self, name: str) -> bool:
        key = said_of(self._batch_axis, name)
        return key is not None and self._batch_axis[key] is None

    def _require_named(self, names: Iterable[str]) -> None:
        """Passes if each key of `batch_axis` names a leaf of what is passed, or what leaves are part of.

        Raises:
            CaptureError: with what there is.
        """
        present = list(dict.fromkeys(names))
        for key in self._batch_axis:
            if not any(f"{name}/".startswith(f"{key}/") for name in present):
                raise CaptureError(f"batch_axis names {key}, and {self._name} is given {', '.join(present)}.")


def count_examples(leaves: Sequence[Leaf]) -> int:
    """The number of examples of a call: the rows of the first array that is split; 0 where none is."""
    return next((leaf.rows for leaf in leaves if leaf.axis is not None), 0)


def split_rows(leaves: Sequence[Leaf]) -> list[tuple[str, int]]:
    """Name and number of rows of what is split."""
    return [(leaf.name, leaf.rows) for leaf in leaves if leaf.axis is not None]


def inputs_apart(inputs: Sequence[str], leaves: Sequence[Leaf], groups: Sequence[int]) -> dict[str, str]:
    """Inputs with another number of rows than the first input has: by name, the first input of the same number."""
    split = [name for name, leaf in zip(inputs, leaves, strict=True) if leaf.axis is not None]
    first: dict[int, str] = {}
    for group, name in zip(groups, split, strict=True):
        first.setdefault(group, name)
    return {name: first[group] for name, group in zip(split, groups, strict=True) if group}
