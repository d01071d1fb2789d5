"""Parses YAML text into plain data, with the line of every key and list item."""

from __future__ import annotations

import re
from typing import Any

import yaml

from autodist.errors import Place, ResourceSpecError
from autodist.resources._limits import (
    DEEPEST,
    LARGEST_SPEC,
    LONG_NUMBER,
    LONGEST_FILE,
    TOO_DEEP,
    TOO_LARGE,
    VALUE_SIZE,
    is_long_number,
    key_fault,
    shown,
    text_fault,
)
from autodist.resources._model import KeyPath, Source, key_text

TAG = "tag:yaml.org,2002:"

_OCTAL = re.compile(r"[-+]?0[0-7_]+\Z")
_CONSTRUCTOR = yaml.constructor.SafeConstructor()


def number_of(node: yaml.ScalarNode, is_secret: bool = False) -> Any:
    """Returns the value of a node that is tagged as int, float, bool or null.

    Args:
        node: a scalar.
        is_secret: True if its text must not appear in a message.

    Raises:
        ValueError: with the reason and the fix: not of its type, too long, or a number that YAML 1.1 reads with
            another base than people and YAML 1.2 do (`1:20:30` is 4830, `010` is 8).
    """
    value_text = "this" if is_secret else shown(node.value)
    is_number = node.tag in (TAG + "int", TAG + "float")
    if is_number and is_long_number(node.value):
        raise ValueError(f"{value_text} {LONG_NUMBER}")
    try:
        value = _CONSTRUCTOR.construct_object(node)
    except (ValueError, KeyError, IndexError) as error:  # as for `!!int abc`, `!!bool abc`, `!!int ""`
        mend = "remove the tag, or put the text in quotes"
        raise ValueError(f"{value_text} does not have the type of its tag; {mend}") from error
    if isinstance(value, int) and is_long_number(value):
        raise ValueError(f"{value_text} {LONG_NUMBER}")
    means, quotes = "" if is_secret else f", {value}", "or put it in quotes if it is text"
    if is_number and ":" in node.value:
        raise ValueError(f"{value_text} is a base-60 number in YAML{means}; write a plain number, {quotes}")
    if isinstance(value, int) and _OCTAL.match(node.value) and value != (plain := int(node.value.replace("_", ""))):
        meant = "" if is_secret else f" (or {plain}, if that is meant)"
        mend = f"write it without the leading 0{meant}, {quotes}"
        raise ValueError(f"{value_text} is an octal number in YAML{means}; {mend}")
    return value


_NUMBER_LIKE = {TAG + name for name in ("int", "float", "bool", "null")}
# A date stays text as the user wrote it: no value of a spec is a date.
_TEXT_LIKE = {TAG + name for name in ("str", "timestamp", "value", "merge")}
_TAB = "found character '\\t'"
_NO_TAB = "; indent with spaces, since YAML does not allow tabs"
_NO_TEXT = "; is this a text file in UTF-8?"


def read_yaml(text: str, file: str) -> tuple[Any, Source]:
    """Reads one YAML document.

    Args:
        text: the document.
        file: its name, for messages.

    Returns:
        Data made of dict, list, str, int, float, bool and None (None for an empty document), and its lines.

    Raises:
        ResourceSpecError: a syntax error, a duplicate key, a key that is not text, a tag such as `!!python/name`,
            a number that people and YAML read differently, a value that contains itself, or a limit of `_limits`.
    """
    root = _compose(text, file)
    if root is None:
        return None, Source(file)
    reader = _Reader(file)
    data = reader.value(root, ())
    return data, Source(file, reader.lines)


def _compose(text: str, file: str) -> yaml.Node | None:
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        character = ord(text[error.position])
        hint = "" if character else _NO_TEXT
        raise _not_yaml(file, line, f"character U+{character:04X} is not allowed{hint}") from error
    try:
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        problem += _NO_TAB if _TAB in problem else ""
        raise _not_yaml(file, mark.line + 1 if mark else 1, problem) from error
    except (ValueError, OverflowError) as error:  # PyYAML does not catch those of "\UFFFFFFFF" and `%YAML 1.9…9`
        problem = "a number in an escape or in a directive is too large"
        raise _not_yaml(file, loader.get_mark().line + 1, problem) from error
    finally:
        loader.dispose()


def _not_yaml(file: str, line: int, problem: str) -> ResourceSpecError:
    return ResourceSpecError(f"not valid YAML: {problem}", Place(file, line, "syntax"))


class _Loader(yaml.SafeLoader):
    """Composes nodes up to a depth limit; PyYAML recurses at each level and would end in a RecursionError."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self._depth > DEEPEST:
            raise yaml.MarkedYAMLError(problem=TOO_DEEP, problem_mark=self.peek_event().start_mark)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


class _Reader:
    """Converts YAML nodes to plain data and records their lines."""

    def __init__(self, file: str) -> None:
        self.lines: dict[str, int] = {}
        self._file = file
        self._around: list[yaml.Node] = []  # the nodes that enclose the current one
        self._size = 0

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        if any(node is outer for outer in self._around):
            raise self._error(node, path, "contains itself through an alias (*name); write its content out")
        if len(self._around) > DEEPEST:
            raise self._error(node, path, TOO_DEEP)
        self._grow(node, path, VALUE_SIZE)
        self._around.append(node)
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == TAG + "map":
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode) and node.tag == TAG + "seq":
                return self._items(node, path)
            return self._scalar(node, path)
        finally:
            self._around.pop()

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        own: dict[str, yaml.Node] = {}
        lines: dict[str, int] = {}
        for key, value in node.value:
            name = self._key(key, path)
            line = key.start_mark.line + 1
            if name in own:
                raise self._error(key, (*path, name), f"duplicate key, first on line {lines[name]}; keep one")
            own[name], lines[name] = value, line
        base = own.pop("<<", None)
        merged = {} if base is None else self._merged(base, path)
        for name in own:  # after the merged keys: the mapping's own keys override their lines
            self._note((*path, name), lines[name])
        kept = {name: value for name, value in merged.items() if name not in own}
        return kept | {name: self.value(value, (*path, name)) for name, value in own.items()}

    def _merged(self, base: yaml.Node, path: KeyPath) -> dict[str, Any]:
        """Returns the keys that `<<: *name` merges; of several bases the first has precedence."""
        merged: dict[str, Any] = {}
        for part in reversed(base.value) if isinstance(base, yaml.SequenceNode) else [base]:
            if not isinstance(part, yaml.MappingNode):
                raise self._error(
                    part, (*path, "<<"), "not a mapping; `<<` takes an alias of a mapping, or a list of aliases"
                )
            merged |= self.value(part, path)
        return merged

    def _items(self, node: yaml.SequenceNode, path: KeyPath) -> list[Any]:
        for index, item in enumerate(node.value):
            self._note((*path, index), item.start_mark.line + 1)
        return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]

    def _key(self, key: yaml.Node, path: KeyPath) -> str:
        if not isinstance(key, yaml.ScalarNode):
            raise self._error(key, path, "a list or mapping is used as a key; keys must be text")
        fault = key_fault(key.value)
        if fault is not None:
            raise self._error(key, path, f"a key is not allowed: {fault}")
        if key.tag not in _TEXT_LIKE:
            raise self._error(
                key, (*path, key.value), f'the key {key.value} is not text; put it in quotes: "{key.value}"'
            )
        return str(key.value)

    def _scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.ScalarNode) and node.tag in _TEXT_LIKE:
            fault = text_fault(node.value)
            if fault is not None:
                raise self._error(node, path, f"the text is not allowed: {fault}")
            self._grow(node, path, len(node.value))
            return node.value
        if isinstance(node, yaml.ScalarNode) and node.tag in _NUMBER_LIKE:
            try:
                return number_of(node, is_secret="shared_envs" in path)
            except ValueError as error:
                raise self._error(node, path, str(error)) from None
        allowed = "text, numbers, true and false, null, lists and mappings"
        raise self._error(node, path, f"the tag {node.tag.replace(TAG, '!!')} is not allowed; allowed: {allowed}")

    def _note(self, path: KeyPath, line: int) -> None:
        key = key_text(path)
        self.lines[key] = line
        self._grow(self._around[-1], path, len(key))

    def _grow(self, node: yaml.Node, path: KeyPath, by: int) -> None:
        self._size += by
        if self._size > LARGEST_SPEC:
            raise self._error(node, path, TOO_LARGE)

    def _error(self, node: yaml.Node, path: KeyPath, problem: str) -> ResourceSpecError:
        return ResourceSpecError(problem, Place(self._file, node.start_mark.line + 1, key_text(path) or "document"))


def read_text(file: str) -> str:
    """Returns the content of a file, without a byte order mark.

    Raises:
        ResourceSpecError: the file cannot be read, is longer than a spec can be, or is not UTF-8.
    """
    try:
        with open(file, "rb") as opened:
            content = opened.read(LONGEST_FILE + 1)  # limited: the file may be a checkpoint, or /dev/zero
    except OSError as error:
        raise ResourceSpecError(f"{file}: cannot be read: {error.strerror}; pass the path of a YAML file") from error
    except ValueError as error:  # NUL in the name, or half of a surrogate pair
        raise ResourceSpecError(f"{file!r}: not a valid file name; pass the path of a YAML file") from error
    if len(content) > LONGEST_FILE:
        limit = f"{LONGEST_FILE >> 20} MiB"
        raise ResourceSpecError(f"{file}: longer than {limit}, the limit for a spec; pass the path of a YAML file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        where = Source(file, {"encoding": line})
        raise where.error(("encoding",), "not UTF-8 text; save the file in UTF-8") from error
