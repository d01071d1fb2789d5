import textwrap

import pytest

from autodist.compressors import BFloat16, Float16, PowerSGD, TopK, Uncompressed
from autodist.errors import StrategyError
from autodist.resources import ResourceSpec, StrategySection
from autodist.strategies import (
    FSDP,
    PS,
    AllReduce,
    Override,
    OverrideVariables,
    Parallax,
    Partition,
    PartitionedAR,
    PartitionedPS,
    PSLoadBalancing,
    RandomAxisPartitionAR,
    ShardedAllReduce,
    UnevenPartitionedPS,
    UseAllReduce,
    UseParameterServer,
    builder_from_section,
    chosen_builder,
)

NODES = "nodes: [{address: localhost, cpus: [0, 1], workers: 2}]\n"


@pytest.fixture
def read(tmp_path):
    """Reads the builder of a YAML with this strategy section, which begins on line 2."""

    def read_section(section):
        path = tmp_path / "cluster.yml"
        path.write_text(NODES + textwrap.dedent(section))
        return builder_from_section(ResourceSpec.from_file(path).strategy).builder

    return read_section


@pytest.fixture
def refusal(read, tmp_path):
    """The text of the error for a section, its place written as line and key."""

    def refuse(section):
        with pytest.raises(StrategyError) as caught:
            read(section)
        return str(caught.value).removeprefix(f"{tmp_path}/cluster.yml:")

    return refuse


def test_without_a_section_it_is_all_reduce():
    assert builder_from_section(None) == AllReduce()


@pytest.mark.parametrize(
    ("section", "builder"),
    [
        ("{builder: AllReduce}", AllReduce()),
        ("AllReduce", AllReduce()),
        ("Parallax", Parallax()),
        ("autodist.strategies.PS", PS()),
        ("{}", AllReduce()),
        ("{compressor: FLOAT16}", AllReduce(compressor=Float16())),
        ("{builder: AllReduce, chunk_size: 64, all_reduce_spec: RING}", AllReduce(64, "RING")),
        ("{builder: PS, owner: 1}", PS(owner=1)),
        ("{builder: PS, owner: 'localhost:1'}", PS(owner="localhost:1")),
        ("{builder: PSLoadBalancing}", PSLoadBalancing()),
        ("{builder: Parallax, chunk_size: 64}", Parallax(chunk_size=64)),
        ("{builder: PS, sync: true, staleness: 0}", PS()),
        ("{builder: PS, local_proxy_variable: false}", PS(local_proxy_variable=False)),
        ("{builder: PSLoadBalancing, sync: false, staleness: 3}", PSLoadBalancing(sync=False, staleness=3)),
        (
            "{builder: PartitionedPS, local_proxy_variable: true, max_shards: 4, min_partition_bytes: 0}",
            PartitionedPS(local_proxy_variable=True, max_shards=4, min_partition_bytes=0),
        ),
        ("{builder: UnevenPartitionedPS, staleness: 2}", UnevenPartitionedPS(staleness=2)),
        ("{builder: PartitionedAR, compressor: BFLOAT16}", PartitionedAR(compressor=BFloat16())),
        ("{builder: RandomAxisPartitionAR, seed: 7}", RandomAxisPartitionAR(seed=7)),
        ("{builder: ShardedAllReduce, min_partition_bytes: 1}", ShardedAllReduce(min_partition_bytes=1)),
        ("{builder: FSDP, prefetch: 0}", FSDP(prefetch=0)),
        ("{builder: AllReduce, compressor: NONE}", AllReduce()),
        (
            "{builder: AllReduce, compressor: {kind: FLOAT16, error_feedback: true}}",
            AllReduce(compressor=Float16(error_feedback=True)),
        ),
        (
            "{builder: AllReduce, compressor: {kind: POWER_SGD, rank: 4}}",
            AllReduce(compressor=PowerSGD(rank=4)),
        ),
        (
            "{builder: Parallax, compressor: {kind: TOP_K, fraction: 0.01}, staleness: 1}",
            Parallax(compressor=TopK(fraction=0.01), staleness=1),
        ),
    ],
)
def test_builder_and_options_come_from_the_section(read, section, builder):
    assert read(f"strategy: {section}") == builder


def test_variables_alone_are_exceptions_from_the_default_builder(read):
    builder = read("strategy: {variables: {emb: {synchronizer: PS, owner: 1}}}")
    assert builder.builder == AllReduce()
    assert [(override.pattern, override.use) for override in builder.overrides] == [
        ("emb", UseParameterServer(owner=1))
    ]


@pytest.mark.parametrize(
    ("given", "builder"),
    [
        (None, PS(owner=1)),  # the YAML's
        ("AllReduce", AllReduce()),
        ({"compressor": "FLOAT16"}, AllReduce(compressor=Float16())),
        (Parallax(), Parallax()),
    ],
)
def test_the_argument_of_a_script_overrides_the_yaml(given, builder):
    section = StrategySection.from_script({"builder": "PS", "owner": 1})
    assert chosen_builder(given, section) == builder


def test_faults_of_a_section_without_a_builder_name_the_default_one(refusal):
    said = refusal("strategy:\n  max_shards: 4\n")
    assert said.startswith("3: strategy.max_shards: AllReduce (the default builder) has no option max_shards. It is an")
    assert refusal("strategy: Paralax\n").startswith(
        "2: strategy.builder: There is no builder named Paralax. Did you mean"
    )


def test_a_section_given_from_python_reads_the_same():
    spec = ResourceSpec.from_dict({"nodes": [{"address": "localhost"}], "strategy": {"builder": "PS", "owner": 0}})
    assert builder_from_section(spec.strategy) == PS(owner=0)


def test_variables_become_overrides_in_their_order(read):
    builder = read("""\
        strategy:
          builder: Parallax
          variables:
            "embedding/.*": {synchronizer: PS, owner: 1}
            ".*/bias": {synchronizer: AllReduce, group: 3, all_reduce_spec: SHUFFLE}
            "head": {synchronizer: PS}
            "a": {synchronizer: PS, partition: {axis: 0, shards: 4}, staleness: 2, owner: [0, "localhost:1", 0, 1]}
            "b": {synchronizer: AllReduce, partition: {sizes: [3, 4]}, compressor: NONE}
            "c": {synchronizer: PS, sync: false, local_proxy_variable: true}
    """)
    assert isinstance(builder, OverrideVariables)
    assert builder.builder == Parallax()
    assert [(override.pattern, override.use, override.place.line) for override in builder.overrides] == [
        ("embedding/.*", UseParameterServer(owner=1), 5),
        (".*/bias", UseAllReduce(group=3, all_reduce_spec="SHUFFLE"), 6),
        ("head", UseParameterServer(), 7),
        (
            "a",
            UseParameterServer(owner=(0, "localhost:1", 0, 1), staleness=2, partition=Partition(axis=0, shards=4)),
            8,
        ),
        ("b", UseAllReduce(partition=Partition(sizes=(3, 4)), compressor=Uncompressed()), 9),
        ("c", UseParameterServer(sync=False, local_proxy_variable=True), 10),
    ]
    assert all(isinstance(override, Override) for override in builder.overrides)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("chunksize: 3", "chunksize: AllReduce has no option chunksize. Did you mean chunk_size? Its options are "
                         "chunk_size, all_reduce_spec, compressor, recompute."),
        ("chunk_size: many", "chunk_size: AllReduce: chunk_size is 'many', which is not allowed: "
                             "input should be a valid integer"),
        ("chunk_size: 0", "chunk_size: AllReduce: chunk_size is 0, which is not allowed: "
                          "input should be greater than or equal to 1."),
        ("all_reduce_spec: ring", "all_reduce_spec: AllReduce: all_reduce_spec is 'ring', which is not allowed: "
                                  "input should be 'AUTO', 'SHUFFLE', 'HIERARCHICAL', 'RING' or 'NCCL'."),
    ],
)  # fmt: skip
def test_a_faulty_option_is_refused_at_its_line(refusal, options, said):
    assert refusal(f"strategy:\n  builder: AllReduce\n  {options}\n").startswith(f"4: strategy.{said}")


def test_a_misspelt_builder_is_refused_at_its_line(refusal):
    assert refusal("strategy:\n  builder: Paralax\n").startswith(
        "3: strategy.builder: There is no builder named Paralax. Did you mean Parallax?"
    )


@pytest.mark.parametrize(
    ("builder", "option", "said"),
    [
        ("PS", "staleness: -1", "staleness: PS: staleness is -1, which is not allowed: input should be greater"),
        ("PS", "staleness: 1.5", "staleness: PS: staleness is 1.5"),
        ("PS", "sync: async", "sync: PS: sync is 'async', which is not allowed: input should be a valid boolean"),
        ("PS", "local_proxy_variable: 1", "local_proxy_variable: PS: local_proxy_variable is 1"),
        ("PS", "owner: [0]", "owner: PS: owner is [0]"),
        ("PartitionedPS", "max_shards: 0", "max_shards: PartitionedPS: max_shards is 0"),
        ("PartitionedAR", "min_partition_bytes: -1", "min_partition_bytes: PartitionedAR: min_partition_bytes is -1"),
        ("RandomAxisPartitionAR", "seed: x", "seed: RandomAxisPartitionAR: seed is 'x'"),
        ("AllReduce", "compressor: float16",
         "compressor: There is no compressor named float16. Did you mean FLOAT16? Known names are "),
        ("AllReduce", "compressor: {rank: 2}", "compressor: AllReduce: compressor needs kind; add its name."),
        ("AllReduce", "compressor: 16", "compressor: AllReduce: compressor is 16, which is not allowed"),
        ("AllReduce", "compressor: {kind: POWER_SGD, rnk: 2}",
         "compressor.rnk: AllReduce: compressor has no option rnk. Did you mean rank?"),
        ("AllReduce", "compressor: {kind: POWER_SGD, rank: 0}", "compressor.rank: AllReduce: compressor: rank is 0"),
        ("AllReduce", "compressor: {kind: TOP_K, fraction: 0}", "compressor.fraction: AllReduce: compressor: frac"),
        ("AllReduce", "compressor: {kind: TOP_K, fraction: 1.1}", "compressor.fraction: AllReduce: compressor: frac"),
        ("AllReduce", "compressor: {kind: TOP_K, rank: 2}",
         "compressor.rank: AllReduce: compressor has no option rank. It is an option of the compressor POWER_SGD; "),
        ("AllReduce", "compressor: {kind: TOP_K, error_feedback: false}",
         "compressor: AllReduce: compressor: error_feedback is False, but TOP_K does not converge without it"),
        ("AllReduce", "compressor: {kind: POWER_SGD, error_feedback: false}",
         "compressor: AllReduce: compressor: error_feedback is False, but POWER_SGD does not converge without it"),
        ("AllReduce", "staleness: 2",
         "staleness: AllReduce has no option staleness. It is an option of PS, PSLoadBalancing, Parallax, "),
        ("PS", "compressor: FLOAT16", "compressor: PS has no option compressor. It is an option of AllReduce, "),
        ("PS", "partition: {shards: 2}",
         "partition: PS has no option partition. It is an option of `synchronizer: AllReduce` for a pattern, "
         "`synchronizer: PS` for a pattern; use one of these, or remove it."),
    ],
)  # fmt: skip
def test_a_faulty_option_of_the_new_builders_is_refused_at_its_line(refusal, builder, option, said):
    assert refusal(f"strategy:\n  builder: {builder}\n  {option}\n").startswith(f"4: strategy.{said}")


def test_an_option_of_a_mapping_is_refused_at_its_own_line(refusal):
    text = refusal("strategy:\n  builder: AllReduce\n  compressor:\n    kind: POWER_SGD\n    rank: many\n")
    assert text.startswith("6: strategy.compressor.rank: AllReduce: compressor: rank is 'many'")


def test_zero_and_false_are_told_apart(refusal):
    assert "staleness is False" in refusal("strategy: {builder: PS, staleness: false}")
    assert "sync is 1" in refusal("strategy: {builder: PS, sync: 1}")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("{owner: 1}", "name no synchronizer; add `synchronizer:` with one of AllReduce, PS."),
        ("{synchronizer: Allreduce}", "is 'Allreduce', which is none of AllReduce, PS. Did you mean AllReduce?"),
        ("{synchronizer: [PS]}", "is ['PS'], which is none of AllReduce, PS."),
        (
            "{synchronizer: PS, group: 1}",
            "PS for the pattern 'x' has no option group. It is an option of `synchronizer: AllReduce` for a pattern; ",
        ),
        (
            "{synchronizer: AllReduce, ownr: 1}",
            "has no option ownr. Its options are group, all_reduce_spec, compressor, local_steps, outer_learning_rate, "
            "outer_momentum, partition.",
        ),
        (
            "{synchronizer: AllReduce, staleness: 2}",
            "AllReduce for the pattern 'x' has no option staleness. It is an option of PS, PSLoadBalancing, Parallax, "
            "PartitionedPS, UnevenPartitionedPS, `synchronizer: PS` for a pattern; use one of these, or remove it.",
        ),
        ("{synchronizer: AllReduce, sync: false}", "has no option sync. It is an option of PS, "),
        (
            "{synchronizer: AllReduce, local_proxy_variable: true}",
            "has no option local_proxy_variable. It is an option",
        ),
        ("{synchronizer: PS, compressor: FLOAT16}", "has no option compressor. It is an option of AllReduce, "),
        ("{synchronizer: PS, staleness: -1}", "staleness is -1, which is not allowed"),
        ("{synchronizer: PS, partition: {axis: -1, shards: 2}}", "partition: axis is -1, which is not allowed"),
        ("{synchronizer: PS, partition: {shards: 0}}", "partition: shards is 0, which is not allowed"),
        ("{synchronizer: PS, partition: {sizes: [2, 0]}}", "partition: sizes is [2, 0], which is not allowed"),
        ("{synchronizer: PS, partition: {sizes: []}}", "partition: sizes is empty; specify the length of each shard"),
        ("{synchronizer: PS, partition: {axis: 1}}", "partition: neither shards nor sizes are given; specify"),
        ("{synchronizer: PS, partition: {shards: 1, sizes: [7]}}", "partition: both shards and sizes are given"),
        ("{synchronizer: PS, partition: {shrds: 2}}", "partition has no option shrds. Did you mean shards?"),
        ("{synchronizer: PS, partition: 3}", "partition is 3, which is not allowed"),
        ("{synchronizer: PS, ownr: 1}", "has no option ownr. Did you mean owner?"),
        ("{synchronizer: PS, owner: [[0]]}", "owner is [[0]], which is not allowed"),
        ("{synchronizer: AllReduce, all_reduce_spec: TREE}", "'AUTO', 'SHUFFLE', 'HIERARCHICAL', 'RING' or 'NCCL'"),
    ],
)
def test_a_faulty_setting_is_refused_at_its_line(refusal, settings, said):
    text = refusal(f"strategy:\n  builder: PS\n  variables:\n    x: {settings}\n")
    assert text.startswith("5: strategy.variables.x")
    assert said in text


def test_a_faulty_pattern_is_refused_at_its_line(refusal):
    text = refusal('strategy:\n  builder: PS\n  variables:\n    "a(": {synchronizer: PS}\n')
    assert text.startswith("5: ")
    assert "'a(' is no regular expression" in text


USER_MODULE = """
from dataclasses import dataclass
from autodist.errors import StrategyError
from autodist.strategies import AllReduce, StrategyBuilder

@dataclass(frozen=True)
class Derived(StrategyBuilder):
    axes: tuple[int, ...]
    staleness: int = 1
    def build(self, graph_item, resource_spec):
        return AllReduce().build(graph_item, resource_spec)

class Plain:
    def __init__(self, rate: float = 1.0, **others):
        self.rate, self.others = rate, others
        if rate < 0:
            raise StrategyError(f"rate is {rate}, which is below 0.")
    def build(self, graph_item, resource_spec):
        return AllReduce().build(graph_item, resource_spec)
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "builders_of_mine.py").write_text(USER_MODULE)


@pytest.mark.usefixtures("user_module")
def test_a_users_own_builder_takes_its_options(read, language_model, cluster):
    derived = read("strategy: {builder: builders_of_mine.Derived, axes: [0, 1], staleness: 3}")
    assert (derived.axes, derived.staleness) == ((0, 1), 3)
    assert derived.build(language_model, cluster()) == AllReduce().build(language_model, cluster())
    plain = read("strategy: {builder: builders_of_mine.Plain, rate: 2, anything: [1]}")
    assert (plain.rate, plain.others) == (2.0, {"anything": [1]})


@pytest.mark.usefixtures("user_module")
def test_a_users_builder_is_refused_without_what_it_needs(refusal):
    text = refusal("strategy:\n  builder: builders_of_mine.Derived\n")
    assert text == "2: strategy: builders_of_mine.Derived needs axes; add it."
    text = refusal("strategy:\n  builder: builders_of_mine.Derived\n  axes: 3\n")
    assert text.startswith("4: strategy.axes: builders_of_mine.Derived: axes is 3, which is not allowed")


@pytest.mark.usefixtures("user_module")
def test_an_error_of_a_users_builder_has_the_place_of_the_section(refusal):
    text = refusal("strategy:\n  builder: builders_of_mine.Plain\n  rate: -1\n")
    assert text == "2: strategy: builders_of_mine.Plain: rate is -1.0, which is below 0."
