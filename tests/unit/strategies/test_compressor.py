import pytest

from autodist.errors import StrategyError
from autodist.proto import strategy_pb2
from autodist.strategies import Compressor, all_reduce_node
from autodist.strategies.compressor import compressor_text

Message = strategy_pb2.Compressor


@pytest.mark.parametrize(
    ("compressor", "message", "text"),
    [
        (Compressor("FLOAT16"), Message(kind="FLOAT16"), "FLOAT16"),
        (
            Compressor("BFLOAT16", error_feedback=True),
            Message(kind="BFLOAT16", error_feedback=True),
            "BFLOAT16 with error feedback",
        ),
        (
            Compressor("POWER_SGD"),
            Message(kind="POWER_SGD", error_feedback=True, rank=4),
            "POWER_SGD rank 4 with error feedback",
        ),
        (
            Compressor("TOP_K", error_feedback=True, fraction=0.001),
            Message(kind="TOP_K", error_feedback=True, fraction=0.001),
            "TOP_K 0.1 % with error feedback",
        ),
    ],
)
def test_a_compressor_becomes_its_message(compressor, message, text):
    assert compressor.to_proto() == message
    assert compressor_text(message) == text


def test_none_leaves_the_node_as_it_is():
    assert all_reduce_node("v", compressor=Compressor("NONE")) == all_reduce_node("v")
    assert not all_reduce_node("v").all_reduce.HasField("compressor")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "FLOAT8"}, "kind is 'FLOAT8', which is not allowed: input should be 'NONE', 'FLOAT16', 'BFLOAT16'"),
        ({"kind": "POWER_SGD", "rank": 0}, "rank is 0, which is not allowed"),
        ({"kind": "TOP_K", "fraction": 0.0}, "fraction is 0.0, which is not allowed"),
        ({"kind": "TOP_K", "fraction": 1.01}, "fraction is 1.01, which is not allowed"),
        ({"kind": "TOP_K", "fraction": float("nan")}, "fraction is nan, which is not allowed"),
        ({"kind": "FLOAT16", "rank": 2}, "rank is an option of POWER_SGD, and the kind is FLOAT16; remove it"),
        ({"kind": "POWER_SGD", "fraction": 0.5}, "fraction is an option of TOP_K, and the kind is POWER_SGD"),
        ({"kind": "NONE", "error_feedback": True}, "NONE loses nothing that could be fed back"),
        ({"kind": "POWER_SGD", "error_feedback": False}, "POWER_SGD does not converge without it"),
        ({"kind": "TOP_K", "error_feedback": False}, "TOP_K does not converge without it"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, said):
    with pytest.raises(StrategyError, match=said):
        Compressor(**options)
