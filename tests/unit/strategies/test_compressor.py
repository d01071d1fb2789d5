import pytest

from autodist.errors import StrategyError
from autodist.proto import strategy_pb2
from autodist.strategies import AllReduce, Compressor, Parallax, PartitionedAR, all_reduce_node
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


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("FLOAT16", Compressor("FLOAT16")),
        ({"kind": "TOP_K", "fraction": 0.1}, Compressor("TOP_K", fraction=0.1)),
        (Compressor("POWER_SGD", rank=2), Compressor("POWER_SGD", rank=2)),
    ],
)
@pytest.mark.parametrize("builder", [AllReduce, PartitionedAR, Parallax])
def test_a_builder_takes_what_the_yaml_takes(builder, given, meant):
    assert builder(compressor=given) == builder(compressor=meant)
    assert builder(compressor=given).compressor == meant


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("float16", "compressor: kind is 'float16', which is not allowed"),
        ({"rank": 2}, "compressor is {'rank': 2}, and its options are kind, error_feedback.*: kind is missing"),
        ({"kind": "TOP_K", "part": 1}, "part is none of them"),
        ({"kind": "TOP_K", "rank": 2}, "compressor: rank is an option of POWER_SGD"),
        (16, "compressor is 16, which is not allowed"),
    ],
)
def test_what_the_yaml_does_not_take_a_builder_does_not_take(given, said):
    with pytest.raises(StrategyError, match=said):
        AllReduce(compressor=given)


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
