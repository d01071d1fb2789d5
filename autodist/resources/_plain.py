"""Plain data from Python: copied, and checked to be what YAML can say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autodist.resources._source import KeyPath, Source


def plain_copy(value: Any, path: KeyPath = ()) -> Any:
    """Copies `value` deeply into dict, list, str, int, float, bool and None; mappings and tuples become dict and list.

    Raises:
        ResourceSpecError: it holds something else, or a key that is not text.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [plain_copy(item, (*path, index)) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {_text_key(key, path): plain_copy(item, (*path, key)) for key, item in value.items()}
    allowed = "text, numbers, booleans, None, lists and mappings"
    raise Source().error(path, f"{value!r} is a {type(value).__name__}; allowed: {allowed}")


def _text_key(key: Any, path: KeyPath) -> str:
    if isinstance(key, str):
        return key
    raise Source().error(path, f"the key {key!r} is a {type(key).__name__}; allowed: text")
