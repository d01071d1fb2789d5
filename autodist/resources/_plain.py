"""Copies Python data and checks that YAML could represent it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autodist.resources._limits import (
    DEEPEST,
    LARGEST_SPEC,
    LONG_NUMBER,
    TOO_DEEP,
    TOO_LARGE,
    VALUE_SIZE,
    is_long_number,
    key_fault,
    shown,
    text_fault,
)
from autodist.resources._model import KeyPath, Source, key_text


def plain_copy(value: Any) -> Any:
    """Copies `value` deeply into dict, list, str, int, float, bool and None; mappings and tuples become dict and list.

    Raises:
        ResourceSpecError: `value` contains another type or a key that is not text, or exceeds a limit of `_limits`.
    """
    return _Copier().copy(value, ())


class _Copier:
    def __init__(self) -> None:
        self._size = 0

    def copy(self, value: Any, path: KeyPath) -> Any:
        if len(path) > DEEPEST:
            raise Source().error(path, TOO_DEEP)
        if value is None or isinstance(value, bool | float):
            return value
        if isinstance(value, int):
            return self._number(value, path)
        if isinstance(value, str):
            return self._text(value, path)
        if isinstance(value, list | tuple):
            return [self._inner(item, (*path, index)) for index, item in enumerate(value)]
        if isinstance(value, Mapping):
            return {self._key(key, path): self._inner(item, (*path, key)) for key, item in value.items()}
        allowed = "text, numbers, booleans, None, lists and mappings"
        raise Source().error(path, f"{shown(value)} is a {type(value).__name__}; allowed: {allowed}")

    def _inner(self, value: Any, path: KeyPath) -> Any:
        self._grow(len(key_text(path)) + VALUE_SIZE, path)
        return self.copy(value, path)

    def _number(self, value: int, path: KeyPath) -> int:
        if is_long_number(value):
            raise Source().error(path, f"this {LONG_NUMBER}")
        return value

    def _text(self, text: str, path: KeyPath) -> str:
        self._grow(len(text), path)
        return str(_passed(text, text_fault(text), path))

    def _key(self, key: Any, path: KeyPath) -> str:
        if not isinstance(key, str):
            raise Source().error(path, f"the key {shown(key)} is a {type(key).__name__}; allowed: text")
        return str(_passed(key, key_fault(key), path))

    def _grow(self, by: int, path: KeyPath) -> None:
        self._size += by
        if self._size > LARGEST_SPEC:
            raise Source().error(path, TOO_LARGE)


def _passed(text: str, fault: str | None, path: KeyPath) -> str:
    if fault is not None:
        raise Source().error(path, f"the text is not allowed: {fault}")
    return text
