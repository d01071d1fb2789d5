"""The messages of `autodist check` pass unchanged, and earlier versions understand them."""

from __future__ import annotations

import json

import pytest

from autodist.cli.checking.messages import (
    ConnectAnswer,
    ConnectRequest,
    MachineAnswer,
    MachineRequest,
    SeenGPUs,
    TimeAnswer,
    TimeRequest,
)
from autodist.cluster.protocol import Message, decode, encode
from tests.unit.cli.checking.fakes import FACTS, HARDWARE


@pytest.mark.parametrize(
    "message, kind",
    [
        (MachineRequest((1, None), "train.py", "/", ("keras",), True), "look"),
        (MachineAnswer(FACTS, (15000, None), HARDWARE, SeenGPUs(0, "no driver")), "machine"),
        (TimeRequest(), "tick"),
        (TimeAnswer(1.5), "tock"),
        (ConnectRequest(("a:1", "b:2"), 5.0), "reach"),
        (ConnectAnswer({"a:1": "no answer"}), "reached"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_message_comes_back_and_has_the_kind_of_earlier_versions(message: Message, kind: str) -> None:
    assert json.loads(encode(message))["kind"] == kind
    assert decode(encode(message)) == message
