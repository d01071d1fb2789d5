from autodist.logs.formatting import did_you_mean, listed, nearest


def test_a_near_name_is_asked_for_whatever_its_case():
    assert did_you_mean("psloadbalancing", ["PS", "PSLoadBalancing"]) == " Did you mean PSLoadBalancing?"


def test_a_far_name_is_not():
    assert did_you_mean("qqq", ["PS", "PSLoadBalancing"]) == ""
    assert did_you_mean("qqq", []) == ""


def test_nearest_names_come_best_first_and_only_so_many():
    assert nearest("dense/krnel", ["dense/bias", "dense/kernel", "dense/knl", "x"]) == [
        "dense/kernel",
        "dense/knl",
        "dense/bias",
    ]


def test_an_empty_list_is_said():
    assert listed([]) == "none"
    assert listed(iter(["a", "b"])) == "a, b"
