import io

import pytest
from rich.console import Console

from autodist.strategies import PS, AllReduce, Parallax, strategy_table
from autodist.strategies.table import readable_bytes


def shown(table):
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()


def cells(table, index):
    return [str(list(column.cells)[index]) for column in table.columns]


def test_a_step_without_gradients_shows_no_rows(step, cluster):
    planned = step({"counter": ()}, without_gradient=["counter"])
    table = strategy_table(AllReduce().build(planned, cluster()), planned)
    assert table.row_count == 0
    assert "0 variables" in shown(table)


def test_each_variable_has_a_row_with_where_and_what_it_costs(language_model, cluster):
    machines = cluster(workers=2, devices=2)
    names = [worker.name for worker in machines.workers]
    table = strategy_table(Parallax().build(language_model, machines), language_model, names)
    assert str(table.title) == "Parallax: 4 replicas on 2 workers"
    assert cells(table, 0) == [
        "embedding",
        "1000 × 8",
        "32.0 kB",
        "sparse",
        "PS",
        "10.0.0.1",
        "48 B a row, owner 32 B",
    ]
    assert cells(table, 1) == [
        "dense/kernel",
        "8 × 100",
        "3.20 kB",
        "dense",
        "AllReduce SHUFFLE, group 0",
        "all workers",
        "3.20 kB",
    ]
    assert table.row_count == 3


def test_the_footer_adds_up_what_is_known_before_the_step(language_model, cluster):
    table = strategy_table(Parallax().build(language_model, cluster()), language_model)
    assert [str(column.footer) for column in table.columns] == [
        "3 variables",
        "",
        "35.6 kB",
        "",
        "",
        "all workers",
        "3.60 kB + rows",
    ]


def test_owners_without_names_are_called_by_index(step, cluster):
    planned = step({"table": (8, 2), "other": (4, 2)}, sparse=["table", "other"])
    table = strategy_table(Parallax().build(planned, cluster()), planned)
    assert [cells(table, row)[5] for row in (0, 1)] == ["worker 0", "worker 1"]


def test_one_worker_sends_nothing_and_one_is_singular(step, cluster):
    planned = step({"scale": ()})
    table = strategy_table(AllReduce().build(planned, cluster(workers=1)), planned)
    assert str(table.title) == "AllReduce: 1 replica on 1 worker"
    assert cells(table, 0)[1] == "scalar"
    assert cells(table, 0)[-1] == "0 B"


def test_names_with_brackets_are_shown_as_they_are(step, cluster):
    planned = step({"layer[red]/kernel": (2,)})
    strategy = PS().build(planned, cluster(workers=3))
    text = shown(strategy_table(strategy, planned, ["[fe80::1]:0", "[fe80::1]:1", "[fe80::1]:2"]))
    assert "layer[red]/kernel" in text
    assert "most at [fe80::1]:0" in text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (9_996_000, "10.0 MB"),
        (40_000_000, "40.0 MB"),
        (123_000_000_000, "123 GB"),
        (5 * 10**15, "5000 TB"),
    ],
)
def test_bytes_are_readable(count, text):
    assert readable_bytes(count) == text
