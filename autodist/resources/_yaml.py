"""YAML text to plain data, with the line of every key and list item."""

from __future__ import annotations

from typing import Any

import yaml

from autodist.errors import Place, ResourceSpecError
from autodist.resources._source import KeyPath, Source, key_text

_TAG = "tag:yaml.org,2002:"
_NUMBER_LIKE = {_TAG + name for name in ("int", "float", "bool", "null")}
# A date stays the text that the user wrote: nothing in a spec is a date.
_TEXT_LIKE = {_TAG + name for name in ("str", "timestamp", "value", "merge")}


def read_yaml(text: str, file: str) -> tuple[Any, Source]:
    """Reads one YAML document.

    Args:
        text: the document.
        file: its name, for messages.

    Returns:
        Data made of dict, list, str, int, float, bool and None (None for an empty document), and its lines.

    Raises:
        ResourceSpecError: a syntax error, a key given twice, a key that is not text, a tag such as `!!python/name`,
            a value that contains itself.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise _not_yaml(file, line, f"character U+{ord(text[error.position]):04X} is not allowed") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise _not_yaml(file, mark.line + 1 if mark else 1, what) from error
    if root is None:
        return None, Source(file)
    reader = _Reader(file)
    data = reader.value(root, ())
    return data, Source(file, reader.lines)


def _not_yaml(file: str, line: int, what: str) -> ResourceSpecError:
    return ResourceSpecError(f"not valid YAML: {what}", Place(file, line, "syntax"))


class _Reader:
    """Turns YAML nodes into plain data and notes their lines."""

    def __init__(self, file: str) -> None:
        self.lines: dict[str, int] = {}
        self._file = file
        self._around: list[yaml.Node] = []  # the nodes that contain the one being read
        self._scalars = yaml.constructor.SafeConstructor()

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        if any(node is outer for outer in self._around):
            raise self._error(node, path, "contains itself through an alias (*name); write its content out")
        self._around.append(node)
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
                return self._items(node, path)
            return self._scalar(node, path)
        finally:
            self._around.pop()

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        own: dict[str, yaml.Node] = {}
        merged: dict[str, Any] = {}
        for key, value in node.value:
            name = self._key(key, path)
            if name in own:
                raise self._error(key, (*path, name), f"given twice, first on line {self._line(path, name)}; keep one")
            own[name] = value
            self.lines[key_text((*path, name))] = key.start_mark.line + 1
        base = own.pop("<<", None)
        if base is not None:
            merged = self._merged(base, path, own)
        return merged | {name: self.value(value, (*path, name)) for name, value in own.items()}

    def _merged(self, base: yaml.Node, path: KeyPath, own: dict[str, yaml.Node]) -> dict[str, Any]:
        """What `<<: *name` brings in; keys of the mapping's own win, and of several bases the first."""
        merged: dict[str, Any] = {}
        for part in base.value if isinstance(base, yaml.SequenceNode) else [base]:
            if not isinstance(part, yaml.MappingNode):
                raise self._error(
                    part, (*path, "<<"), "not a mapping; `<<` takes an alias of a mapping, or a list of such"
                )
            kept = dict(self.lines)
            values = self.value(part, path)
            # Lines of what the mapping itself says were noted first and stay.
            self.lines.update(kept)
            merged = values | merged
        return {name: value for name, value in merged.items() if name not in own}

    def _items(self, node: yaml.SequenceNode, path: KeyPath) -> list[Any]:
        for index, item in enumerate(node.value):
            self.lines[key_text((*path, index))] = item.start_mark.line + 1
        return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]

    def _key(self, key: yaml.Node, path: KeyPath) -> str:
        if not isinstance(key, yaml.ScalarNode):
            raise self._error(key, path, "a list or mapping is used as a key; keys are text")
        if key.tag not in _TEXT_LIKE:
            raise self._error(
                key, (*path, key.value), f'the key {key.value} is not text; put it in quotes: "{key.value}"'
            )
        return str(key.value)

    def _scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.ScalarNode) and node.tag in _TEXT_LIKE:
            return node.value
        if isinstance(node, yaml.ScalarNode) and node.tag in _NUMBER_LIKE:
            try:
                return self._scalars.construct_object(node)
            except (ValueError, KeyError) as error:  # as for `!!int abc`, `!!bool abc`
                raise self._error(node, path, f"{node.value!r} is not of the type that its tag says") from error
        allowed = "text, numbers, true and false, null, lists and mappings"
        raise self._error(node, path, f"the tag {node.tag.replace(_TAG, '!!')} is not allowed; allowed: {allowed}")

    def _line(self, path: KeyPath, name: str) -> int:
        return self.lines[key_text((*path, name))]

    def _error(self, node: yaml.Node, path: KeyPath, problem: str) -> ResourceSpecError:
        return ResourceSpecError(problem, Place(self._file, node.start_mark.line + 1, key_text(path) or "document"))
