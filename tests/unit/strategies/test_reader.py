import textwrap

import pytest

from autodist.errors import StrategyError
from autodist.resources import ResourceSpec
from autodist.strategies import (
    PS,
    AllReduce,
    Override,
    OverrideVariables,
    Parallax,
    PSLoadBalancing,
    UseAllReduce,
    UseParameterServer,
    builder_from_section,
)

NODES = "nodes: [{address: localhost, cpus: [0, 1], workers: 2}]\n"


@pytest.fixture
def read(tmp_path):
    """Reads the builder of a YAML whose strategy section is given; the section begins on line 2."""

    def read_section(section):
        path = tmp_path / "cluster.yml"
        path.write_text(NODES + textwrap.dedent(section))
        return builder_from_section(ResourceSpec.from_file(path).strategy)

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
        ("{builder: AllReduce, chunk_size: 64, all_reduce_spec: RING}", AllReduce(64, "RING")),
        ("{builder: PS, owner: 1}", PS(owner=1)),
        ("{builder: PS, owner: 'localhost:1'}", PS(owner="localhost:1")),
        ("{builder: PSLoadBalancing}", PSLoadBalancing()),
        ("{builder: Parallax, chunk_size: 64}", Parallax(chunk_size=64)),
        # What asks for nothing that this version lacks.
        ("{builder: PS, sync: true, staleness: 0, local_proxy_variable: false, compressor: null}", PS()),
    ],
)
def test_builder_and_options_come_from_the_section(read, section, builder):
    assert read(f"strategy: {section}") == builder


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
    """)
    assert isinstance(builder, OverrideVariables)
    assert builder.builder == Parallax()
    assert [(override.pattern, override.use, override.place.line) for override in builder.overrides] == [
        ("embedding/.*", UseParameterServer(owner=1), 5),
        (".*/bias", UseAllReduce(group=3, all_reduce_spec="SHUFFLE"), 6),
        ("head", UseParameterServer(), 7),
    ]
    assert all(isinstance(override, Override) for override in builder.overrides)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("chunksize: 3", "chunksize: AllReduce has no option chunksize. Did you mean chunk_size? Its options are "
                         "chunk_size, all_reduce_spec."),
        ("chunk_size: many", "chunk_size: AllReduce: chunk_size is 'many', which is not allowed: "
                             "input should be a valid integer"),
        ("chunk_size: 0", "chunk_size: AllReduce: chunk_size is 0, which is not allowed: "
                          "input should be greater than or equal to 1."),
        ("all_reduce_spec: ring", "all_reduce_spec: AllReduce: all_reduce_spec is 'ring', which is not allowed: "
                                  "input should be 'AUTO', 'SHUFFLE', 'RING' or 'NCCL'."),
    ],
)  # fmt: skip
def test_a_faulty_option_is_refused_at_its_line(refusal, options, said):
    assert refusal(f"strategy:\n  builder: AllReduce\n  {options}\n").startswith(f"4: strategy.{said}")


def test_a_misspelt_builder_is_refused_at_its_line(refusal):
    assert refusal("strategy:\n  builder: Paralax\n").startswith(
        "3: strategy.builder: There is no builder named Paralax. Did you mean Parallax?"
    )


LATER = [
    ("compressor", "float16"),
    ("local_proxy_variable", "true"),
    ("partition", "{axis: 0, shards: 4}"),
    ("staleness", "2"),
    ("sync", "false"),
]


@pytest.mark.parametrize(("key", "value"), LATER)
def test_what_this_version_cannot_do_is_refused_as_an_option(refusal, key, value):
    text = refusal(f"strategy:\n  builder: PS\n  {key}: {value}\n")
    assert text.startswith(f"4: strategy.{key}: PS: {key} is ")
    assert text.endswith("this version of AutoDist cannot do that yet; remove it.")


@pytest.mark.parametrize(("key", "value"), LATER)
def test_what_this_version_cannot_do_is_refused_for_a_pattern(refusal, key, value):
    text = refusal(f"""\
        strategy:
          builder: PS
          variables:
            "embedding/.*":
              synchronizer: PS
              {key}: {value}
    """)
    assert text.startswith(f'7: strategy.variables["embedding/.*"].{key}: ')
    assert f"PS for the pattern 'embedding/.*': {key} is " in text
    assert text.endswith("this version of AutoDist cannot do that yet; remove it.")


def test_zero_and_false_are_told_apart(refusal):
    assert "staleness is False" in refusal("strategy: {builder: PS, staleness: false}")
    assert "sync is 1" in refusal("strategy: {builder: PS, sync: 1}")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("{owner: 1}", "name no synchronizer; add `synchronizer:` with one of AllReduce, PS."),
        ("{synchronizer: Allreduce}", "is 'Allreduce', which is none of AllReduce, PS. Did you mean AllReduce?"),
        ("{synchronizer: [PS]}", "is ['PS'], which is none of AllReduce, PS."),
        ("{synchronizer: PS, group: 1}", "PS for the pattern 'x' has no option group. Its options are owner."),
        ("{synchronizer: AllReduce, ownr: 1}", "has no option ownr. Its options are group, all_reduce_spec."),
        ("{synchronizer: PS, ownr: 1}", "has no option ownr. Did you mean owner?"),
        ("{synchronizer: PS, owner: [0]}", "owner is [0], which is not allowed"),
        ("{synchronizer: AllReduce, all_reduce_spec: TREE}", "'AUTO', 'SHUFFLE', 'RING' or 'NCCL'"),
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
def test_what_a_users_builder_refuses_itself_gets_the_sections_place(refusal):
    text = refusal("strategy:\n  builder: builders_of_mine.Plain\n  rate: -1\n")
    assert text == "2: strategy: builders_of_mine.Plain: rate is -1.0, which is below 0."
