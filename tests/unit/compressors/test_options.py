import pytest

from autodist.compressors import BFloat16, Compressor, Float8, Float16, Int8, PowerSGD, TopK, Uncompressed
from autodist.errors import StrategyError
from autodist.proto import strategy_pb2
from autodist.strategies import AllReduce, Parallax, PartitionedAR, all_reduce_node

Message = strategy_pb2.Compressor


@pytest.mark.parametrize(
    ("compressor", "message", "text"),
    [
        (Float16(), Message(kind="FLOAT16"), "FLOAT16"),
        (
            BFloat16(error_feedback=True),
            Message(kind="BFLOAT16", error_feedback=True),
            "BFLOAT16 with error feedback",
        ),
        (Int8(), Message(kind="INT8", block=256), "INT8 block 256"),
        (
            Float8(error_feedback=True, block=64),
            Message(kind="FLOAT8", error_feedback=True, block=64),
            "FLOAT8 block 64 with error feedback",
        ),
        (
            PowerSGD(),
            Message(kind="POWER_SGD", error_feedback=True, rank=4),
            "POWER_SGD rank 4 with error feedback",
        ),
        (
            TopK(error_feedback=True, fraction=0.001),
            Message(kind="TOP_K", error_feedback=True, fraction=0.001),
            "TOP_K 0.1 % with error feedback",
        ),
    ],
)
def test_a_compressor_becomes_its_message(compressor, message, text):
    assert compressor.to_message() == message
    assert Compressor.from_message(message) == compressor
    assert compressor.text == text


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("FLOAT16", Float16()),
        ({"kind": "TOP_K", "fraction": 0.1}, TopK(fraction=0.1)),
        (PowerSGD(rank=2), PowerSGD(rank=2)),
    ],
)
@pytest.mark.parametrize("builder", [AllReduce, PartitionedAR, Parallax])
def test_a_builder_takes_what_the_yaml_takes(builder, given, meant):
    assert builder(compressor=given) == builder(compressor=meant)
    assert builder(compressor=given).compressor == meant


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "float16",
            "There is no compressor named float16. Did you mean FLOAT16[?] Known names are BFLOAT16, ",
        ),
        ({"rank": 2}, "compressor needs kind; add its name"),
        ({"kind": "TOP_K", "part": 1}, "part is not one of them"),
        (
            {"kind": "TOP_K", "rank": 2},
            "compressor is {'rank': 2}, but its options are fraction, error_feedback: rank is not one of them",
        ),
        (16, "compressor is 16, which is not allowed"),
    ],
)
def test_options_refused_by_the_yaml_are_refused_by_builders(given, said):
    with pytest.raises(StrategyError, match=said):
        AllReduce(compressor=given)


def test_none_leaves_the_node_as_it_is():
    assert all_reduce_node("v", compressor=Uncompressed()) == all_reduce_node("v")
    assert not all_reduce_node("v").all_reduce.HasField("compressor")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "FLOAT4"}, "There is no compressor named FLOAT4. Did you mean "),
        ({"kind": 8}, "compressor has 8 for kind; add its name"),
        ({"kind": "INT8", "block": 7}, "block is 7, which is not allowed"),
        ({"kind": "INT8", "rank": 2}, "its options are error_feedback, block: rank is not one of them"),
        ({"kind": "POWER_SGD", "rank": 0}, "rank is 0, which is not allowed"),
        ({"kind": "TOP_K", "fraction": 0.0}, "fraction is 0.0, which is not allowed"),
        ({"kind": "TOP_K", "fraction": 1.01}, "fraction is 1.01, which is not allowed"),
        ({"kind": "TOP_K", "fraction": float("nan")}, "fraction is nan, which is not allowed"),
        ({"kind": "FLOAT16", "rank": 2}, "its options are error_feedback: rank is not one of them"),
        ({"kind": "POWER_SGD", "fraction": 0.5}, "its options are rank, error_feedback: fraction is not one of them"),
        ({"kind": "NONE", "error_feedback": True}, "its options are none: error_feedback is not one of them"),
        ({"kind": "POWER_SGD", "error_feedback": False}, "POWER_SGD does not converge without it"),
        ({"kind": "TOP_K", "error_feedback": False}, "TOP_K does not converge without it"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, said):
    with pytest.raises(StrategyError, match=said):
        AllReduce(compressor=options)
