import pytest

from autodist.errors import Place, StrategyError
from autodist.strategies import PS, AllReduce, find_builder, register, registered_names, registry

PLACE = Place("cluster.yml", 3, "strategy.builder")


@pytest.fixture(autouse=True)
def _restore_registry(monkeypatch):
    monkeypatch.setattr(registry._BUILDERS, "_known", dict(registry._BUILDERS._known))


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Writes a user's module on Python's search path."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)

    return write


def test_our_own_builders_are_known():
    assert registered_names() == (
        "AllReduce",
        "Auto",
        "DiLoCo",
        "FSDP",
        "Megatron",
        "Mesh",
        "PS",
        "PSLoadBalancing",
        "Parallax",
        "PartitionedAR",
        "PartitionedPS",
        "Pipeline",
        "RandomAxisPartitionAR",
        "ShardedAllReduce",
        "UnevenPartitionedPS",
    )
    assert find_builder("AllReduce") is AllReduce


@pytest.mark.parametrize(("given", "meant"), [("AllReduc", "AllReduce"), ("parallax", "Parallax"), ("ps", "PS")])
def test_a_misspelt_name_is_refused_with_the_nearest(given, meant):
    with pytest.raises(StrategyError, match=f"no builder named {given}. Did you mean {meant}[?]") as caught:
        find_builder(given, PLACE)
    assert caught.value.place == PLACE
    assert "my_package.MyBuilder" in str(caught.value)


@pytest.mark.parametrize("name", [".MyBuilder", "package.", "a b.C", "a..B"])
def test_a_name_that_is_no_module_and_class_is_refused(name):
    with pytest.raises(StrategyError, match="no builder named"):
        find_builder(name, PLACE)


def test_a_registered_class_is_found_by_its_name():
    @register
    class Mine:
        def build(self, graph_item, resource_spec): ...

    assert find_builder("Mine") is Mine


def test_one_name_for_two_classes_is_refused():
    impostor = type("PS", (), {"build": lambda self, graph_item, resource_spec: None})
    with pytest.raises(StrategyError, match=r"PS is registered already, from autodist.strategies.ps"):
        register(impostor)
    assert find_builder("PS") is PS


def test_a_module_that_is_reloaded_registers_its_class_again():
    def load():
        return register(type("Twice", (), {"build": lambda self: None, "__qualname__": "Twice", "__module__": "mine"}))

    first, second = load(), load()
    assert first is not second
    assert find_builder("Twice") is second


def test_a_users_class_is_imported(user_module):
    user_module("first_of_mine", "class MyBuilder:\n    def build(self, graph_item, resource_spec): ...\n")
    assert find_builder("first_of_mine.MyBuilder", PLACE).__name__ == "MyBuilder"


def test_a_module_that_does_not_exist_is_named():
    with pytest.raises(
        StrategyError, match=r"no module not_there_at_all. It must be in the folder of the script"
    ) as caught:
        find_builder("not_there_at_all.MyBuilder", PLACE)
    assert caught.value.place == PLACE


def test_a_module_whose_own_import_fails_is_told_from_one_that_is_not_there(user_module):
    user_module("lacks_another", "import not_there_either\n")
    with pytest.raises(StrategyError, match="lacks_another cannot be imported: No module named 'not_there_either'"):
        find_builder("lacks_another.MyBuilder", PLACE)
    user_module("lacks_a_name", "from os import no_such_name\n")
    with pytest.raises(StrategyError, match="lacks_a_name cannot be imported: cannot import name 'no_such_name'"):
        find_builder("lacks_a_name.MyBuilder", PLACE)


def test_an_attribute_that_does_not_exist_is_refused_with_the_nearest(user_module):
    user_module("second_of_mine", "class MyBuilder:\n    def build(self, graph_item, resource_spec): ...\n")
    with pytest.raises(StrategyError, match=r"second_of_mine has no MyBilder. Did you mean MyBuilder[?]"):
        find_builder("second_of_mine.MyBilder", PLACE)


def test_a_class_that_is_no_builder_is_refused_with_the_reason(user_module):
    user_module("third_of_mine", "class Plain: ...\ndef function(): ...\n")
    with pytest.raises(StrategyError, match=r"third_of_mine.Plain is not a builder but a class without a method build"):
        find_builder("third_of_mine.Plain", PLACE)
    with pytest.raises(StrategyError, match=r"third_of_mine.function is not a builder but a function"):
        find_builder("third_of_mine.function", PLACE)
