"""What goes between a notebook's process and those that it launches: values as bytes, functions and classes included.

Functions and classes that stand in no module that can be imported, as those of cells, go as they are (cloudpickle), and
their source with them: AutoGraph and tracebacks read it.
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
"""Bytes of a function with all that it needs; each worker gets them in one piece."""

_LONGEST_REASON = 400
"""Letters: Keras tells why it cannot save or load something on a page or two."""

_MODULES = (
    "Modules that a launched function uses have to be installed, or stand at the same path, on every machine; `sync` "
    "in the YAML brings a folder there."
)


@dataclass(frozen=True)
class Pickled:
    """What one process packs and another unpacks.

    Attributes:
        content: the value, pickled.
        sources: by name of a file, or of a cell, its text: what the value's functions were compiled from.
        path: folders of modules that the packing process imports from.
        settings: of each Keras that the packing process has imported.
    """

    content: bytes
    sources: dict[str, str] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    settings: tuple[KerasSettings, ...] = ()


def pack(value: object, what: str, mend: str) -> bytes:
    """A value as bytes, for a process of the same Python.

    Args:
        value: what goes there.
        what: its name in an error.
        mend: how a value that cannot go there is replaced by one that can.

    Raises:
        LaunchError: it holds what belongs to this process alone.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
        pickler.dump(value)
    except Exception as error:  # what is pickled says itself how, and may raise anything
        raise LaunchError(f"{what} cannot go to another process ({_in_short(error)}). {mend}") from error
    sources = {file: text for file in pickler.files if (text := "".join(linecache.getlines(file)))}
    path = tuple(os.path.abspath(folder) for folder in sys.path if folder)
    return pickle.dumps(Pickled(stream.getvalue(), sources, path, KerasSettings.of_this_process()))


def unpack(packed: bytes, takes_settings: bool = False) -> Any:
    """What `pack` was given.

    Args:
        packed: by it.
        takes_settings: whether Keras is told here what it was told there, before anything is made.

    Raises:
        LaunchError: this process lacks a module, or something in one, that it is made of, or it cannot be made again.
    """
    pickled: Pickled = pickle.loads(packed)
    sys.path[1:1] = [folder for folder in pickled.path if folder not in sys.path]
    for file, text in pickled.sources.items():
        if not os.path.exists(file):
            # No time of change: the text stays, whatever looks for the file.
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    try:
        if takes_settings:
            for settings in pickled.settings:
                settings.apply()
        return pickle.loads(pickled.content)
    except Exception as error:  # as above
        mend = _MODULES if isinstance(error, ImportError | AttributeError) else "Send what it can be made of."
        raise LaunchError(f"what was sent here cannot be put together ({_in_short(error)}). {mend}") from error


def _in_short(error: Exception) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", _LONGEST_REASON, placeholder=" …")


class _Pickler(cloudpickle.Pickler):
    """Notes the files of functions that are pickled as they are.

    Attributes:
        files: names of these.
    """

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.files: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if isinstance(obj, FunctionType):
            if reduced is not NotImplemented:
                self.files.add(obj.__code__.co_filename)
        elif isinstance(obj, CodeType):  # cloudpickle leaves out which file's it is, since 3.1.3
            make, parts = self.dispatch_table[CodeType](obj)
            return _code_of_file, (obj.co_filename, make, *parts)
        elif isinstance(obj, BaseException):
            if isinstance(type(obj).__init__, FunctionType) and type(obj).__reduce__ is BaseException.__reduce__:
                return _remade_error, (type(obj), obj.args, dict(vars(obj)))
        elif (saveable := _keras_saveable()) is not None and isinstance(obj, saveable):
            own, saved = _own_classes(obj), obj.__reduce__()
            if own:  # Keras saves them whether or not it can make them again: better told here than there
                _remade_by_keras(own, *saved)
            return _remade_by_keras, (own, *saved)
        return reduced


def _code_of_file(file: str, make: Callable[..., CodeType], *parts: Any) -> CodeType:
    return make(*parts).replace(co_filename=file)


def _remade_error(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """An error without its `__init__`, which may take other arguments than the message that it has made of them."""
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(state)
    return error


def _keras_saveable() -> type | None:
    """What Keras pickles in the form of its files; None where Keras is not in use."""
    module = sys.modules.get("keras.src.saving.keras_saveable")
    return getattr(module, "KerasSaveable", None)


def _own_classes(saved: Any) -> tuple[type, ...]:
    """Classes of the script's own in a model: Keras's files hold their names alone."""
    parts: Iterable[Any] = (saved, getattr(saved, "optimizer", None), getattr(saved, "loss", None))
    if hasattr(saved, "_flatten_layers"):
        parts = (*parts, *saved._flatten_layers())
    kinds = {type(part): None for part in parts if type(part).__module__.partition(".")[0] not in ("keras", "builtins")}
    return tuple(kinds)


def _remade_by_keras(kinds: tuple[type, ...], make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    import keras

    names = {name: kind for kind in kinds for name in (kind.__name__, keras.saving.get_registered_name(kind))}
    with keras.saving.custom_object_scope(names), warnings.catch_warnings():
        # Of an optimizer that has made no step: what Keras counts and tells of is not lost, it is not there yet.
        warnings.filterwarnings("ignore", r"Skipping variable loading for optimizer .* saved optimizer has 2 variables")
        return make(*arguments)


@dataclass(frozen=True)
class KerasSettings:
    """Settings of one Keras by which the same code makes and computes something else.

    Attributes:
        floatx: the type of floats, by name.
        epsilon: the small number that Keras divides by in place of 0.
        image_data_format: where images have their channels.
        dtype_policy: as Keras serializes it; None: nobody has asked for one, so it goes by `floatx`.
        library: the module of that Keras, `keras` or `tf_keras`.
    """

    floatx: str
    epsilon: float
    image_data_format: str
    dtype_policy: dict[str, Any] | str | None
    library: str = "keras"

    @staticmethod
    def of_this_process() -> tuple[KerasSettings, ...]:
        """The settings of each Keras that is in use here."""
        found = []
        for library, policies in _LIBRARIES.items():
            if hasattr(sys.modules.get(library), "Model"):  # else it is being imported, or is not in use
                own = sys.modules[library].backend
                told = policies.asked_for()
                found.append(KerasSettings(own.floatx(), own.epsilon(), own.image_data_format(), told, library))
        return tuple(found)

    def apply(self) -> None:
        """Makes them those of this process."""
        own = importlib.import_module(self.library).backend
        own.set_floatx(self.floatx)
        own.set_epsilon(self.epsilon)
        own.set_image_data_format(self.image_data_format)
        if self.dtype_policy is not None:
            _LIBRARIES[self.library].ask_for(self.dtype_policy)


class _Policies:
    """The dtype policy that Keras 3 gives to all layers."""

    @staticmethod
    def asked_for() -> Any:
        """The policy as Keras serializes it; None where nobody has set one. Keras's own function would settle it."""
        import keras
        from keras.src.backend.common import global_state

        policy = global_state.get_global_attribute("dtype_policy")
        return None if policy is None else keras.dtype_policies.serialize(policy)

    @staticmethod
    def ask_for(told: Any) -> None:
        import keras

        keras.config.set_dtype_policy(keras.dtype_policies.deserialize(told))


class _LegacyPolicies:
    """The dtype policy that tf_keras gives to all layers."""

    @staticmethod
    def asked_for() -> Any:
        from tf_keras.src.mixed_precision import policy

        return None if policy._global_policy is None else policy.serialize(policy._global_policy)

    @staticmethod
    def ask_for(told: Any) -> None:
        from tf_keras.src.mixed_precision import policy

        policy.set_global_policy(policy.deserialize(told))


_LIBRARIES: dict[str, type[_Policies] | type[_LegacyPolicies]] = {"keras": _Policies, "tf_keras": _LegacyPolicies}
