"""Any input gives a spec or one of AutoDist's own errors; YAML files and Python values are read alike."""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autodist.errors import ResourceSpecError
from autodist.resources import Node, ResourceSpec, SSHGroup

KEYS = [
    "nodes",
    "ssh",
    "strategy",
    "batch",
    "batch_norm",
    "xla",
    "metrics",
    "folder",
    "every_steps",
    "builder",
    "variables",
    "source",
    *Node.model_fields,
    *SSHGroup.model_fields,
]
SCALARS = (
    st.none() | st.booleans() | st.integers(-2, 70000) | st.floats() | st.sampled_from(["a", "b", "", "-", "global"])
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYS, "x y"]), inner, max_size=4),
    max_leaves=12,
)
NODE = st.dictionaries(st.sampled_from([*Node.model_fields, "prot"]), ANYTHING, max_size=4)
SPECS = st.fixed_dictionaries(
    {"nodes": st.lists(NODE.map(lambda node: {"address": "a", **node}), max_size=2) | ANYTHING},
    optional=dict.fromkeys(["ssh", "strategy", "batch", "batch_norm", "xla", "metrics", "source"], ANYTHING),
)


def outcome(content: Any) -> ResourceSpec | str:
    try:
        return ResourceSpec.from_dict(content)
    except ResourceSpecError as error:
        return error.problem


@given(content=ANYTHING | SPECS)
def test_anything_gives_a_spec_or_a_spec_error(content: Any) -> None:
    result = outcome(content)
    if isinstance(result, str):
        assert "Input should" not in result
        assert "allowed" in result
    else:
        assert len(result.replicas) >= 1
        assert ResourceSpec.from_payload(result.to_payload()).to_payload() == result.to_payload()


# Elements of YAML's syntax, and typical content.
TOKENS = st.sampled_from(
    [
        *KEYS,
        *"[]{},:-?&*!|>'\"%@`#~= \n\t\r\0\x85\ufeff\ud800",
        *("\n  ", "\n    ", ": ", "- ", "&a ", "*a", "<<: ", "!!", "!!int ", "!!float ", "!!python/name:os.system"),
        *("---\n", "...\n", "%YAML ", "%TAG ! ", "\\U", "\\x", "nodes:\n  - address: a\n    "),
        *("1:20:30", "010", "0x", "1_0", ".inf", "1e999", "yes", "2001-01-01"),
    ]
)
TEXTS = st.lists(TOKENS | st.text(max_size=5), max_size=30).map("".join)


def outcome_of_file(content: bytes) -> ResourceSpec | ResourceSpecError:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "cluster.yml")
        path.write_bytes(content)
        try:
            return ResourceSpec.from_file(path)
        except ResourceSpecError as error:
            return error


@given(text=TEXTS)
def test_any_text_gives_a_spec_or_an_error_with_a_place(text: str) -> None:
    result = outcome_of_file(text.encode("utf-8", "surrogatepass"))
    assert isinstance(result, ResourceSpec) or result.place is not None


@given(text=TEXTS)
def test_any_end_of_a_spec_gives_a_spec_or_an_error_with_a_place(text: str) -> None:
    beginning = (
        "nodes:\n  - address: a\n    cpus: &a [0, 1]\nssh: {lab: {shared_envs: {A: b}}}\nstrategy:\n  builder: PS\n"
    )
    result = outcome_of_file(beginning.encode() + text.encode("utf-8", "surrogatepass"))
    assert isinstance(result, ResourceSpec) or result.place is not None


@given(content=st.binary())
def test_any_bytes_give_a_spec_or_an_error_with_a_place(content: bytes) -> None:
    result = outcome_of_file(content)
    assert isinstance(result, ResourceSpec) or result.place is not None


@given(content=SPECS)
def test_a_file_is_read_as_the_same_from_python(content: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "cluster.yml")
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        expected = outcome(content)
        if isinstance(expected, ResourceSpec):
            # As text, since NaN in an option differs from itself.
            assert str(ResourceSpec.from_file(path).to_dict()) == str(expected.to_dict())
        else:
            with pytest.raises(ResourceSpecError) as caught:
                ResourceSpec.from_file(path)
            assert caught.value.place is not None
