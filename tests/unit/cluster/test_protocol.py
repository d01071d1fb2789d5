from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autodist.cluster.protocol import (
    Doing,
    Done,
    Exited,
    Facts,
    Heartbeat,
    Inspect,
    Joined,
    Leaving,
    Line,
    Lost,
    Membership,
    Message,
    Progress,
    ProgressRequest,
    ProtocolError,
    Release,
    Start,
    Stop,
    decode,
    encode,
)

PRINTED = st.text(st.characters(codec="utf-8"))
TEXT = st.text()  # names of files may hold halves of surrogate pairs
JOINS = st.builds(
    Membership, st.integers(0, 99), TEXT, st.lists(TEXT).map(tuple), st.binary(), st.floats(0, 1e9), st.floats(0, 1e9)
)
MESSAGES = st.one_of(
    st.builds(Inspect, st.none() | TEXT, TEXT, st.none() | st.integers()),
    st.builds(Facts, TEXT, st.none() | TEXT, st.none() | st.integers(), st.lists(TEXT).map(tuple), st.none() | TEXT),
    st.builds(Start, st.lists(TEXT).map(tuple), TEXT, st.dictionaries(st.sampled_from("ABC"), TEXT), JOINS),
    JOINS,
    st.builds(Line, st.sampled_from(["stdout", "stderr"]), PRINTED),
    st.builds(Exited, st.integers(-64, 255)),
    st.builds(Lost, TEXT),
    st.builds(Progress, st.sampled_from(Doing), st.floats(0, 1e9), st.floats(0, 1e9), st.floats(0, 1e9)),
    st.sampled_from([ProgressRequest(), Joined(), Leaving(), Done(), Release(), Stop(), Heartbeat()]),
)


@given(MESSAGES)
def test_message_is_one_line_and_comes_back(message: Message) -> None:
    line = encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode(line) == message


@pytest.mark.parametrize(
    "line",
    [b"", b"\n", b"Membership to this machine\n", b"[]\n", b"3\n", b"{}\n", b'{"kind":"Nothing"}\n',
     b'{"kind":"Exited"}\n', b'{"kind":"Exited","status":"many"}\n',
     b'{"kind":"Lost","problem":"\xe2\x82\xac"}\n', b"\xff\n"],
)  # fmt: skip
def test_other_lines_are_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a message"):
        decode(line)


def test_what_another_version_adds_is_left_out_and_what_it_leaves_out_has_a_default() -> None:
    assert decode(b'{"kind":"Inspect","script":"a","directory":"b","port":1,"news":{"x":1}}\n') == Inspect("a", "b", 1)
    line = b'{"kind":"Facts","python":"3.11.7","tensorflow":null,"port":1,"problems":[]}\n'
    assert decode(line) == Facts("3.11.7", None, 1, (), None)
