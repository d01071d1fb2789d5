import io

import pytest
from rich.console import Console

from autodist.compressors import PowerSGD
from autodist.placement.partitioning import Partitioning
from autodist.strategies import (
    PS,
    SYNCHRONOUS,
    AllReduce,
    Parallax,
    PartitionedAR,
    PartitionedPS,
    PSLoadBalancing,
    all_reduce_synchronizer,
    make_strategy,
    partitioned_node,
    strategy_table,
    synced_variables,
)

BY_ROWS = Parallax(local_proxy_variable=False)
"""Workers request rows also of small tables."""


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
    table = strategy_table(BY_ROWS.build(language_model, machines), language_model, names)
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
    table = strategy_table(BY_ROWS.build(language_model, cluster()), language_model)
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


def test_shards_are_shown_with_axis_owners_and_what_they_cost(step, cluster):
    planned = step({"table": (1000, 8), "kernel": (100, 10), "scalar": ()}, sparse=["table"])
    machines = cluster(3)
    names = [worker.name for worker in machines.workers]
    strategy = PartitionedPS(min_partition_bytes=0, max_shards=4, local_proxy_variable=False).build(planned, machines)
    table = strategy_table(strategy, planned, names)
    where = "4 shards of axis 0: 2 at 10.0.0.1, 1 at 10.0.0.2, 1 at 10.0.0.3"
    assert cells(table, 0)[4:] == ["PS", where, "52 B to 56 B a row"]
    assert cells(table, 1)[-1] == "4.00 kB to 6.00 kB"
    many = strategy_table(PartitionedPS(min_partition_bytes=0).build(planned, cluster(6)), planned)
    assert cells(many, 0)[5] == "6 shards of axis 0 at 6 workers"
    one = strategy_table(PartitionedPS(min_partition_bytes=0, max_shards=2).build(planned, cluster(1)), planned)
    assert cells(one, 0)[5] == "2 shards of axis 0 at worker 0"


def test_all_reduced_shards_are_shown_with_their_groups(step, cluster):
    planned = step({"kernel": (100, 10), "bias": (10,)})
    builder = PartitionedAR(chunk_size=1, max_shards=4, min_partition_bytes=100)
    table = strategy_table(builder.build(planned, cluster()), planned)
    assert cells(table, 0)[4:6] == ["AllReduce SHUFFLE, groups 0 to 3", "4 shards of axis 0 at all workers"]
    assert cells(table, 1)[4:6] == ["AllReduce SHUFFLE, group 4", "all workers"]


def test_shards_in_different_ways_are_shown_with_each(step, cluster):
    planned = step({"kernel": (4, 10)})
    shards = [all_reduce_synchronizer(2), SYNCHRONOUS.parameter_server(1)]
    node = partitioned_node("kernel", Partitioning(0, (1, 3)), shards)
    table = strategy_table(make_strategy("Mine", cluster(), synced_variables(planned), [node]), planned)
    assert cells(table, 0)[4:6] == [
        "AllReduce SHUFFLE, group 2; PS",
        "2 shards of axis 0 at all workers, worker 1",
    ]


def test_a_compressor_is_shown_and_counted(step, cluster):
    planned = step({"kernel": (100, 100), "bias": (100,)})
    builder = AllReduce(compressor=PowerSGD(rank=2))
    table = strategy_table(builder.build(planned, cluster()), planned)
    assert cells(table, 0)[4] == "AllReduce SHUFFLE POWER_SGD rank 2 with error feedback, group 0"
    assert [cells(table, row)[-1] for row in (0, 1)] == ["1.60 kB", "400 B"]
    assert str(table.columns[-1].footer) == "2.00 kB"


def test_the_treatment_of_slow_workers_by_a_parameter_server_is_shown(step, cluster):
    planned = step({"table": (10, 8)}, sparse=["table"])
    builder = PS(sync=False, staleness=4, local_proxy_variable=True)
    table = strategy_table(builder.build(planned, cluster()), planned)
    assert cells(table, 0)[4] == "PS, asynchronous, staleness 4, proxies"
    assert cells(table, 0)[-1] == "owner 320 B + 40 B a row"


def test_workers_without_replicas_count_as_workers(step, cluster):
    planned = step({"kernel": (10, 10), "bias": (10,)})
    machines = cluster(3, servers=1)
    table = strategy_table(PSLoadBalancing().build(planned, machines), planned, [w.name for w in machines.workers])
    assert str(table.title) == "PSLoadBalancing: 2 replicas on 3 workers"
    assert cells(table, 0)[5:] == ["10.0.0.3", "400 B, owner 800 B"]
    assert str(table.columns[5].footer) == "most at 10.0.0.3"


def test_names_with_brackets_are_shown_as_they_are(step, cluster):
    planned = step({"layer[red]/kernel": (2,)})
    strategy = PS().build(planned, cluster(workers=3))
    text = shown(strategy_table(strategy, planned, ["[fe80::1]:0", "[fe80::1]:1", "[fe80::1]:2"]))
    assert "layer[red]/kernel" in text
    assert "most at [fe80::1]:0" in text


@pytest.mark.parametrize("width", [40, 80, 119])
def test_a_narrow_terminal_has_a_table_that_fits_and_leaves_nothing_out(language_model, cluster, width):
    machines = cluster(workers=2)
    names = [worker.name for worker in machines.workers]
    table = strategy_table(BY_ROWS.build(language_model, machines), language_model, names, width)
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    assert max(len(line.rstrip()) for line in console.file.getvalue().splitlines()) <= width
    assert cells(table, 0) == ["embedding\n1000 × 8, 32.0 kB, sparse", "PS\n10.0.0.1", "48 B a row, owner 32 B"]
    assert [str(column.footer) for column in table.columns] == ["3 variables\n35.6 kB", "all workers", "3.60 kB + rows"]


def test_a_wide_terminal_has_the_wide_table(language_model, cluster):
    strategy = PS().build(language_model, cluster())
    assert len(strategy_table(strategy, language_model, width=120).columns) == 7


@pytest.mark.parametrize(
    "builder, workers, told",
    [
        (AllReduce(), 2, "each worker holds 35.6 kB of trained variables"),
        (BY_ROWS, 2, "held of trained variables: worker 0 35.6 kB, worker 1 3.60 kB"),
        (Parallax(local_proxy_variable=True), 2, "each worker holds 35.6 kB of trained variables"),
        (PS(owner=1), 5, "each worker holds 35.6 kB of trained variables"),
        (
            PS(owner=1, local_proxy_variable=False),
            5,
            "workers hold 0 B to 35.6 kB of trained variables, most worker 1",
        ),
        (PartitionedPS(min_partition_bytes=0), 2, "each worker holds 35.6 kB of trained variables"),
        (
            PartitionedPS(min_partition_bytes=0, local_proxy_variable=False),
            2,
            "each worker holds 17.8 kB of trained variables",
        ),
    ],
)
def test_the_memory_of_each_worker_is_shown(language_model, cluster, builder, workers, told):
    strategy = builder.build(language_model, cluster(workers=workers))
    assert str(strategy_table(strategy, language_model).caption) == told


def test_known_sizes_of_the_whole_state_are_shown_instead(language_model, cluster):
    strategy = PS().build(language_model, cluster())
    assert (
        str(strategy_table(strategy, language_model, held=[1000, 5]).caption) == "held: worker 0 1.00 kB, worker 1 5 B"
    )


def test_the_rows_of_the_first_batch_are_told_with_what_they_cost(step, cluster):
    planned = step({"table": (1000, 8), "other": (1000, 8)}, sparse=["table", "other"])
    strategy = AllReduce().build(planned, cluster(workers=2))
    table = strategy_table(strategy, planned, rows={"table": 50})
    assert cells(table, 0)[-1] == "2.00 kB for 50 rows"  # of 8 float32 and an index each
    assert cells(table, 1)[-1] == "40 B a row"
    assert [str(column.footer) for column in table.columns][-1] == "2.00 kB + rows"
    both = strategy_table(strategy, planned, rows={"table": 50, "other": 1})
    assert cells(both, 1)[-1] == "40 B for 1 row"
    assert [str(column.footer) for column in both.columns][-1] == "2.04 kB"


def test_of_many_variables_the_largest_have_a_row_and_the_others_one_together(step, cluster):
    planned = step({f"v{k}": (k + 1,) for k in range(60)})
    table = strategy_table(AllReduce().build(planned, cluster()), planned)
    assert table.row_count == 51
    assert [cells(table, row)[0] for row in (0, 49)] == ["v10", "v59"]
    assert cells(table, 50) == ["and 10 smaller variables", "", "220 B", "", "", "", ""]
    assert "`autodist plan --json` lists the 10 smaller variables" in str(table.caption)
    footer = [str(column.footer) for column in table.columns]
    assert (footer[0], footer[2]) == ("60 variables", "7.32 kB")
