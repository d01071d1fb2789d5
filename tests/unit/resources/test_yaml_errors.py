"""Invalid YAML, and YAML features that the file does not need, are rejected with file and line."""

from __future__ import annotations

import pathlib

import pytest

from autodist.errors import Place, ResourceSpecError
from autodist.resources import ResourceSpec, _yaml
from tests.unit.resources.faults import HEAD, NODE, Fault, assert_is_told, read

SYNTAX = {
    "syntax": (
        "nodes:\n  - {address: a\nssh: {}\n",
        3,
        "syntax",
        "not valid YAML: while parsing a flow mapping, expected",
    ),
    "tab": (
        "nodes:\n\t- a\n",
        2,
        "syntax",
        "not valid YAML: while scanning for the next token, found character '\\t'"
        " that cannot start any token; indent with spaces, since YAML does not allow tabs",
    ),
    "two documents": (HEAD + "---\na: 1\n", 3, "syntax", "not valid YAML: expected a single document in the stream"),
    "control character": ("nodes:\n  - \x07\n", 2, "syntax", "not valid YAML: character U+0007 is not allowed"),
    "tag": (
        NODE + "cpus: !!python/name:os.system\n",
        3,
        "nodes[0].cpus",
        "the tag !!python/name:os.system is not allowed",
    ),
    "false tag": (NODE + "port: !!int abc\n", 3, "nodes[0].port", "'abc' does not have the type of its tag"),
    "key twice": (HEAD + "ssh:\n  a: {}\n  a: {}\n", 5, "ssh.a", "duplicate key, first on line 4; keep one"),
    "key not text": (HEAD + "ssh:\n  1: {}\n", 4, 'ssh["1"]', 'the key 1 is not text; put it in quotes: "1"'),
    "key is a list": (HEAD + "ssh:\n  [a]: {}\n", 4, "ssh", "a list or mapping is used as a key; keys must be text"),
    "endless": (HEAD + "ssh: &s\n  lab: *s\n", 3, "ssh.lab", "contains itself through an alias"),
    "other base": (
        NODE + "port: 1:20:30\n",
        3,
        "nodes[0].port",
        "'1:20:30' is a base-60 number in YAML, 4830; write a plain number, or put it in quotes",
    ),
    "other base in a key's text": (
        HEAD + "ssh: {lab: {username: 1:20.5}}\n",
        3,
        "ssh.lab.username",
        "'1:20.5' is a bas",
    ),
    "octal": (
        NODE + "port: 010000\n",
        3,
        "nodes[0].port",
        "'010000' is an octal number in YAML, 4096; write it without the leading 0 (or 10000, if that is meant)",
    ),
    "new octal": (
        NODE + "port: 0o17\n",
        3,
        "nodes[0].port",
        '"0o17" is not allowed; allowed: a whole number from 1024',
    ),
    "long number": (NODE + f"port: {'9' * 5000}\n", 3, "nodes[0].port", f"'{'9' * 59}… has too many digits"),
    "long hexadecimal number": (
        NODE + f"port: 0x{'f' * 20}\n",
        3,
        "nodes[0].port",
        f"'0x{'f' * 20}' has too many digits",
    ),
    "empty number": (NODE + 'port: !!int ""\n', 3, "nodes[0].port", "'' does not have the type of its tag"),
    "no word for true": (
        NODE + "ssh_config: no\n",
        3,
        "nodes[0].ssh_config",
        "false is not allowed; allowed: the name",
    ),
    "brackets": (
        "nodes: " + "[" * 3000,
        1,
        "syntax",
        "not valid YAML: nested more than 32 levels deep; use fewer levels",
    ),
    "dashes": ("- " * 3000, 1, "syntax", "not valid YAML: nested more than 32 levels deep"),
    "blocks": (
        "".join(f"{' ' * level}k:\n" for level in range(1000)),
        33,
        "syntax",
        "not valid YAML: nested more than 32 levels deep",
    ),
    "aliases nest": (
        "a: &a0 [x]\n" + "".join(f"a{level}: &a{level} [*a{level - 1}]\n" for level in range(1, 40)),
        1,
        "a31" + "[0]" * 32,
        "nested more than 32 levels deep",
    ),
    "escape": (
        HEAD + 'batch: "\\UFFFFFFFF"\n',
        3,
        "syntax",
        "not valid YAML: a number in an escape or in a directive is",
    ),
    "directive": (f"%YAML 1.{'9' * 5000}\n---\n{HEAD}", 1, "syntax", "not valid YAML: a number in an escape or in"),
    "binary": (
        "nodes:\n\0",
        2,
        "syntax",
        "not valid YAML: character U+0000 is not allowed; is this a text file in",
    ),
    "NUL": (
        HEAD + 'ssh: {lab: {username: "a\\0"}}\n',
        3,
        "ssh.lab.username",
        "the text is not allowed: it contains the character U+0000; allowed: text without NUL or unpaired",
    ),
    "surrogate": (
        HEAD + 'ssh: {lab: {key_file: "\\uD800"}}\n',
        3,
        "ssh.lab.key_file",
        "the text is not allowed: it con",
    ),
    "NUL in a key": (HEAD + 'ssh: {"a\\0": {}}\n', 3, "ssh", "a key is not allowed: it contains the character U+0000"),
    "long key": (
        HEAD + f"? {'k' * 2000}\n: 1\n",
        3,
        "document",
        f"a key is not allowed: the key that starts with '{'k' * 59}… has 2000 characters; allowed: up to 1000",
    ),
    "bad merge": (NODE + "<<: 5\n", 3, 'nodes[0]["<<"]', "not a mapping; `<<` takes an alias of a mapping"),
}


@pytest.mark.parametrize("fault", SYNTAX.values(), ids=SYNTAX.keys())
def test_error_names_file_line_key_and_what_is_allowed(tmp_path: pathlib.Path, fault: Fault) -> None:
    assert_is_told(tmp_path, fault)


def assert_is_too_large(tmp_path: pathlib.Path, text: str) -> None:
    _, error = read(tmp_path, text)
    assert error.problem.startswith("too large: it holds too many values, or too long ones, once its aliases (*name)")
    assert error.place is not None


def test_aliases_that_stand_for_gigabytes_are_refused(tmp_path: pathlib.Path) -> None:
    lists = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 20))
    assert_is_too_large(tmp_path, lists)


@pytest.mark.parametrize(
    "text",
    [
        "a0: &a0 {k: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 30)),
        f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 10_000)}]\n",
    ],
    ids=["merges", "texts"],
)
def test_merged_mappings_and_texts_are_counted_as_often_as_aliases_name_them(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(_yaml, "LARGEST_SPEC", 1 << 20)  # sooner than after seconds
    assert_is_too_large(tmp_path, text)


def test_a_file_that_is_too_long_is_not_read_to_its_end() -> None:
    with pytest.raises(ResourceSpecError, match="/dev/zero: longer than 1 MiB, the limit for a spec"):
        ResourceSpec.from_file("/dev/zero")


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_name_that_no_file_has_is_refused(name: str) -> None:
    with pytest.raises(ResourceSpecError, match="not a valid file name; pass the path of a YAML file"):
        ResourceSpec.from_file(name)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_other_encodings_are_told(tmp_path: pathlib.Path, encoding: str) -> None:
    _, error = read(tmp_path, HEAD.encode(encoding))
    assert "UTF-8" in error.problem


def test_encoding_other_than_utf8_is_refused(tmp_path: pathlib.Path) -> None:
    file, error = read(tmp_path, b"nodes:\n  - {address: \xff}\n")
    assert error.place == Place(file, 2, "encoding")
    assert error.problem == "not UTF-8 text; save the file in UTF-8"


@pytest.mark.parametrize("name, reason", [("absent.yml", "No such file or directory"), (".", "Is a directory")])
def test_a_file_that_cannot_be_read_is_named(tmp_path: pathlib.Path, name: str, reason: str) -> None:
    with pytest.raises(ResourceSpecError, match=reason) as caught:
        ResourceSpec.from_file(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_faults_in_merged_mappings_stand_where_they_were_written(tmp_path: pathlib.Path) -> None:
    base = "nodes:\n  - &base\n    address: a\n    cpus: [0, 0]\n    chief: true\n"
    file, error = read(tmp_path, base + "  - <<: *base\n    chief: false\n    address: b\n")
    assert error.place == Place(file, 4, "nodes[0].cpus[1]")
    assert f"also {file}:4: nodes[1].cpus[1]: 0 is listed twice" in str(error)
