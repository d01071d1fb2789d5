import pytest

from autodist.compressors import Float16, TopK
from autodist.errors import StrategyError
from autodist.options.fields import OptionError
from autodist.placement.group import Group
from autodist.placement.partitioning import Partitioning
from autodist.placement.synchrony import Synchrony, SyncMode
from autodist.proto import strategy_pb2
from autodist.strategies import partitioned_node, whole_node
from autodist.synchronizers import (
    AllReduce,
    ParameterServer,
    all_synchronizers,
    has_synchronizer,
    named_synchronizers,
    partitioning_of,
    synchronizer_of,
    synchronizers_of,
)
from autodist.synchronizers.reading import KINDS

ONE_OF_EACH = [
    AllReduce("RING", 3),
    AllReduce("SHUFFLE", 0, TopK(0.1)),
    ParameterServer(2),
    ParameterServer(1, asynchronous=True, staleness=2, local_proxy=True),
]


@pytest.mark.parametrize("said", ONE_OF_EACH, ids=lambda said: said.text)
def test_what_is_said_of_a_variable_is_read_as_it_was_written(said):
    node = whole_node("v", said)
    assert synchronizer_of(node) == said and has_synchronizer(node)
    assert node == whole_node("v", said.to_message())
    assert list(named_synchronizers(node)) == [("v", said)] and partitioning_of(node) is None


def test_every_field_of_a_node_and_of_a_shard_has_the_class_of_its_message():
    for message in (strategy_pb2.VariableNode, strategy_pb2.Shard):
        fields = message.DESCRIPTOR.oneofs_by_name["synchronizer"].fields
        assert {field.name: KINDS[field.name].message.DESCRIPTOR for field in fields} == {
            field.name: field.message_type for field in fields
        }
        assert {type(one) for one in ONE_OF_EACH} == {KINDS[field.name] for field in fields}


def test_each_shard_has_its_own():
    node = partitioned_node("v", Partitioning(1, (2, 3)), [ONE_OF_EACH[0], ONE_OF_EACH[2]])
    assert synchronizers_of(node) == (ONE_OF_EACH[0], ONE_OF_EACH[2]) and partitioning_of(node) == Partitioning(
        1, (2, 3)
    )
    assert list(named_synchronizers(node)) == [("v/shard_0", ONE_OF_EACH[0]), ("v/shard_1", ONE_OF_EACH[2])]
    strategy = strategy_pb2.Strategy(nodes=[node, whole_node("w", ONE_OF_EACH[1])])
    assert list(all_synchronizers(strategy)) == [("v", ONE_OF_EACH[0]), ("v", ONE_OF_EACH[2]), ("w", ONE_OF_EACH[1])]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (strategy_pb2.VariableNode(variable="v"), "has a node without a synchronizer; set all_reduce or parameter_"),
        (strategy_pb2.Shard(), "has a shard without a synchronizer"),
    ],
)
def test_a_message_without_one_is_refused(part, said):
    assert not has_synchronizer(part)
    with pytest.raises(StrategyError, match=said):
        synchronizer_of(part)


@pytest.mark.parametrize(
    ("message", "option", "said"),
    [
        (strategy_pb2.AllReduce(spec=9), "all_reduce_spec", "has the all-reduce spec 9, which does not exist"),
        (strategy_pb2.ParameterServer(staleness=-1), "staleness", "has staleness -1, but a worker cannot be fewer"),
        (
            strategy_pb2.AllReduce(compressor=strategy_pb2.Compressor(kind="TOP_K", fraction=2)),
            "compressor",
            "cannot be compressed: the compressor TOP_K: fraction is 2.0, which is not allowed",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_its_option(message, option, said):
    with pytest.raises(OptionError, match=said) as caught:
        synchronizer_of(whole_node("v", message))
    assert caught.value.option == option


def test_who_keeps_a_variable():
    assert AllReduce().synchrony is None and AllReduce(compressor=Float16()).owner is None
    assert ParameterServer(1).synchrony == Synchrony()
    assert ParameterServer(1, staleness=3).synchrony == Synchrony(SyncMode.STALE, 3)
    assert ParameterServer(1, asynchronous=True, staleness=3).synchrony == Synchrony(SyncMode.ASYNCHRONOUS, 3)
    assert ParameterServer(1, local_proxy=True).has_cached_copy and not AllReduce().has_cached_copy


@pytest.mark.parametrize(
    ("said", "sent_to"),
    [
        (AllReduce("SHUFFLE"), {0: [1, 3], 1: [0, 3], 2: [0, 1, 3], 3: [0, 1]}),
        (AllReduce("RING"), {0: [1], 1: [3], 3: [0]}),
        (ParameterServer(1), {0: [1], 1: [0, 3], 3: [1]}),
        (ParameterServer(2), {0: [2], 1: [2], 2: [0, 1, 3], 3: [2]}),
    ],
)
def test_to_whom_a_worker_sends(said, sent_to):
    assert {worker: said.targets(worker, Group.of_workers([0, 1, 3])) for worker in sent_to} == sent_to
