import pytest

from autodist.sharding import Dim, Sharding

TEXTS = ["[]", "[–]", "[?]", "[a·b, c?]", "[d·c?, –] !b", "[a p1, c? p2]", "[? p2]", "[a, ?] !c !d +e"]


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_form_is_read_back(text):
    assert str(Sharding.parse(text)) == text


@pytest.mark.parametrize("text", ["a", "[a", "[a b]", "[a,,b]", "[a] b", "[a p]"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="write it like"):
        Sharding.parse(text)


def test_removed_axes():
    assert str(Sharding.parse("[a p1, c? p2] !b +a").without("ac")) == "[–, ? p2] !b"
    assert str(Sharding.parse("[a·b]").without("a")) == "[b]"


def test_axes_of_a_dimension():
    sharding = Sharding.parse("[?, –]").with_axes(0, ["a", "b"])
    assert str(sharding) == "[a·b?, –]"
    assert sharding.axes == (("a", "b"), ())
    assert sharding.divides
    assert not sharding.is_closed
    assert list(Sharding.parse("[a] !b +c").used()) == ["a", "b", "c"]
    assert Sharding.open(2).dims == (Dim(is_open=True),) * 2
    assert Sharding.replicated(1).is_closed
