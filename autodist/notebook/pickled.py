"""Serializes values between a notebook's process and the processes that it launches, with functions and classes.

Functions and classes outside importable modules, such as those of cells, are pickled by value (cloudpickle), with their
source for AutoGraph and tracebacks.
"""

from __future__ import annotations

import importlib
import io
import linecache
import os
import pickle
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import cloudpickle

from autodist.errors import LaunchError

LARGEST = 256 << 20
"""Bytes of a function with all that it needs; each worker receives them in one message."""

_LONGEST_REASON = 400
"""Characters; Keras's explanations of a failed save or load may fill pages."""

_MODULES = (
    "Modules that a launched function uses must be installed, or be at the same path, on every machine; `sync` "
    "in the YAML copies a folder there."
)


@dataclass(frozen=True)
class Pickled:
    """A value packed by one process for another.

    Attributes:
        content: the pickled value.
        sources: the source text of the value's functions, by name of a file or cell.
        path: folders from which the packing process imports modules.
        settings: the settings of each Keras that the packing process has imported.
    """

    content: bytes
    sources: dict[str, str] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    settings: tuple[KerasSettings, ...] = ()


def pack(value: object, what: str, mend: str) -> bytes:
    """Returns a value as bytes, for a process with the same Python.

    Args:
        value: the value.
        what: its name in an error.
        mend: the fix that the error suggests for a value that cannot be pickled.

    Raises:
        LaunchError: it holds an object that belongs to this process alone.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
        pickler.dump(value)
    except Exception as error:  # pickling calls methods of the value, which may raise anything
        raise LaunchError(f"{what} cannot go to another process ({_in_short(error)}). {mend}") from error
    sources = {file: text for file in pickler.files if (text := "".join(linecache.getlines(file)))}
    path = tuple(os.path.abspath(folder) for folder in sys.path if folder)
    return pickle.dumps(Pickled(stream.getvalue(), sources, path, KerasSettings.of_this_process()))


def unpack(packed: bytes, takes_settings: bool = False) -> Any:
    """Returns the value that `pack` packed.

    Args:
        packed: result of `pack`.
        takes_settings: True to apply the sender's Keras settings before the value is unpickled.

    Raises:
        LaunchError: this process lacks a module or a name in it that the value needs, or unpickling failed.
    """
    pickled: Pickled = pickle.loads(packed)
    sys.path[1:1] = [folder for folder in pickled.path if folder not in sys.path]
    for file, text in pickled.sources.items():
        if not os.path.exists(file):
            # Without a modification time, `linecache` keeps the text although the file does not exist.
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    try:
        if takes_settings:
            for settings in pickled.settings:
                settings.apply()
        return pickle.loads(pickled.content)
    except Exception as error:  # unpickling may raise anything, too
        mend = _MODULES if isinstance(error, ImportError | AttributeError) else "Send the values that it is made from."
        raise LaunchError(f"the value sent here cannot be unpickled ({_in_short(error)}). {mend}") from error


def _in_short(error: Exception) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", _LONGEST_REASON, placeholder=" …")


class _Pickler(cloudpickle.Pickler):
    """Records the files of functions that are pickled by value.

    Attributes:
        files: their names.
    """

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.files: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if isinstance(obj, FunctionType):
            if reduced is not NotImplemented:
                self.files.add(obj.__code__.co_filename)
        elif isinstance(obj, CodeType):  # cloudpickle drops the file name since 3.1.3
            make, parts = self.dispatch_table[CodeType](obj)
            return _code_of_file, (obj.co_filename, make, *parts)
        elif isinstance(obj, BaseException):
            if isinstance(type(obj).__init__, FunctionType) and type(obj).__reduce__ is BaseException.__reduce__:
                return _remade_error, (type(obj), obj.args, dict(vars(obj)))
        elif (saveable := _keras_saveable()) is not None and isinstance(obj, saveable):
            own, saved = _own_classes(obj), obj.__reduce__()
            if own:  # Keras saves these classes even if it cannot load them: the error is clearer here
                _remade_by_keras(own, *saved)
            return _remade_by_keras, (own, *saved)
        return reduced


def _code_of_file(file: str, make: Callable[..., CodeType], *parts: Any) -> CodeType:
    return make(*parts).replace(co_filename=file)


def _remade_error(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """Creates an error without calling its `__init__`, whose parameters may differ from `args`."""
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(state)
    return error


def _keras_saveable() -> type | None:
    """Returns the class of objects that Keras pickles in its file format; None if Keras is not in use."""
    module = sys.modules.get("keras.src.saving.keras_saveable")
    return getattr(module, "KerasSaveable", None)


def _own_classes(saved: Any) -> tuple[type, ...]:
    """Returns the custom classes in a model; Keras's files hold only their names."""
    parts: Iterable[Any] = (saved, getattr(saved, "optimizer", None), getattr(saved, "loss", None))
    if hasattr(saved, "_flatten_layers"):
        parts = (*parts, *saved._flatten_layers())
    kinds = {type(part): None for part in parts if type(part).__module__.partition(".")[0] not in ("keras", "builtins")}
    return tuple(kinds)


def _remade_by_keras(kinds: tuple[type, ...], make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    import keras

    names = {name: kind for kind in kinds for name in (kind.__name__, keras.saving.get_registered_name(kind))}
    with keras.saving.custom_object_scope(names), warnings.catch_warnings():
        # An optimizer without any step has no variables yet, so this warning of Keras reports no loss.
        warnings.filterwarnings("ignore", r"Skipping variable loading for optimizer .* saved optimizer has 2 variables")
        return make(*arguments)


@dataclass(frozen=True)
class KerasSettings:
    """Settings of a Keras module that change the results of the same code.

    Attributes:
        floatx: the default float dtype, by name.
        epsilon: the small number that Keras uses to avoid division by 0.
        image_data_format: position of the channel axis of images.
        dtype_policy: the policy as serialized by Keras; None: not set, so `floatx` applies.
        library: the module of that Keras, `keras` or `tf_keras`.
        distribution: the distribution that is set, pickled; None: none is set.
    """

    floatx: str
    epsilon: float
    image_data_format: str
    dtype_policy: dict[str, Any] | str | None
    library: str = "keras"
    distribution: bytes | None = None

    @staticmethod
    def of_this_process() -> tuple[KerasSettings, ...]:
        """Returns the settings of each Keras module in use."""
        found = []
        for library, policies in _LIBRARIES.items():
            if hasattr(sys.modules.get(library), "Model"):  # else it is being imported, or not in use
                own = sys.modules[library].backend
                formats = own.floatx(), own.epsilon(), own.image_data_format()
                found.append(KerasSettings(*formats, policies.current(), library, policies.distribution()))
        return tuple(found)

    def apply(self) -> None:
        """Applies the settings to this process."""
        own = importlib.import_module(self.library).backend
        own.set_floatx(self.floatx)
        own.set_epsilon(self.epsilon)
        own.set_image_data_format(self.image_data_format)
        if self.dtype_policy is not None:
            _LIBRARIES[self.library].restore(self.dtype_policy)
        if self.distribution is not None:
            importlib.import_module("keras").distribution.set_distribution(pickle.loads(self.distribution))


class _Policies:
    """The global dtype policy of Keras 3, and its distribution."""

    @staticmethod
    def current() -> Any:
        """Returns the serialized policy; None if it is not set. Keras's own getter would set it."""
        import keras
        from keras.src.backend.common import global_state

        policy = global_state.get_global_attribute("dtype_policy")
        return None if policy is None else keras.dtype_policies.serialize(policy)

    @staticmethod
    def restore(serialized: Any) -> None:
        import keras

        keras.config.set_dtype_policy(keras.dtype_policies.deserialize(serialized))

    @staticmethod
    def distribution() -> bytes | None:
        """Returns the pickled distribution that is set; None if none is."""
        import keras

        current = keras.distribution.distribution()
        return None if current is None else cloudpickle.dumps(current)


class _LegacyPolicies:
    """The global dtype policy of tf_keras."""

    @staticmethod
    def current() -> Any:
        from tf_keras.src.mixed_precision import policy

        return None if policy._global_policy is None else policy.serialize(policy._global_policy)

    @staticmethod
    def restore(serialized: Any) -> None:
        from tf_keras.src.mixed_precision import policy

        policy.set_global_policy(policy.deserialize(serialized))

    @staticmethod
    def distribution() -> bytes | None:
        """Returns None: tf_keras has no distributions."""
        return None


_LIBRARIES: dict[str, type[_Policies] | type[_LegacyPolicies]] = {"keras": _Policies, "tf_keras": _LegacyPolicies}
