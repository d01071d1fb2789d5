"""Values come back slice by slice, each to the worker that has it, whoever has written them and in which shards."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf

from autodist.checkpoint import slices
from autodist.checkpoint.slices import read_here, read_into_session
from autodist.checkpoint.write import PartWriter, merge
from autodist.graph.placement import EVERY_WORKER, Cut, Placement
from autodist.runtime import pieces as pieces_module
from autodist.runtime.host import Host
from autodist.runtime.pieces import Pieces
from autodist.runtime.variables import Tracked

VALUE = np.arange(24.0).reshape(4, 6)

PLACEMENTS = {
    "whole": Placement(),
    "whole at a worker": Placement(None, (1,)),
    "rows at owners": Placement(Cut(0, (1, 3)), (1, 0), ((), ())),
    "rows with copies": Placement(Cut(0, (2, 2)), (1, 0), (("/proxy",), ())),
    "columns": Placement(Cut(1, (2, 1, 3)), (0, EVERY_WORKER, 1), ((), (), ())),
}


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host("", tf.compat.v1.ConfigProto())
    yield host
    host.close()


def written(host: Host, folder: str, placement: Placement) -> str:
    pieces = Pieces(host, 0, 2, lambda worker, dtype: "")
    saved = Tracked(tf.Variable(VALUE), "saved", placement)
    pieces.push([saved])
    prefix = f"{folder}/merged"
    merge(PartWriter(host, pieces, lambda worker: "").write({"k": saved.kept}, folder), prefix)
    return prefix


@pytest.mark.parametrize("group", [1, 1 << 20])
@pytest.mark.parametrize("before", PLACEMENTS)
def test_what_was_saved_in_some_shards_is_read_in_others(host, tmp_path, monkeypatch, before, group):
    monkeypatch.setattr(pieces_module, "GROUP_BYTES", group)
    prefix = written(host, str(tmp_path), PLACEMENTS[before])
    asked: list[int] = []
    pieces = Pieces(host, 0, 2, lambda worker, dtype: "")
    for k, after in enumerate(PLACEMENTS.values()):
        one = Tracked(tf.Variable(np.zeros_like(VALUE)), f"v{k}", after)
        read_into_session(host, pieces, lambda worker: asked.append(worker) or "", prefix, [("k", one.kept)])
        assert set(asked) == {w for shard in one.shards for w, _ in pieces.named_holders(shard)}
        asked.clear()
        pieces.pull([one])
        np.testing.assert_array_equal(one.source, VALUE)
        for shard in one.shards:
            for _, name in pieces.named_holders(shard):
                with host.graph.as_default():
                    handle = tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=shard.shape, shared_name=f"v{k}{name}")
                    read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64)
                part = tuple(slice(b, b + n) for b, n in zip(shard.begin, shard.shape, strict=True))
                np.testing.assert_array_equal(host.session.run(read), VALUE[part])


@pytest.mark.parametrize("group", [1, 100, 1 << 20])
def test_a_variable_of_this_process_is_read_in_slices(host, tmp_path, monkeypatch, group):
    prefix = written(host, str(tmp_path), PLACEMENTS["columns"])
    monkeypatch.setattr(slices, "GROUP_BYTES", group)
    variable = tf.Variable(np.zeros_like(VALUE))
    sizes = []
    restored = slices._restored
    monkeypatch.setattr(slices, "_restored", lambda *asked: sizes.append(asked[2]) or restored(*asked))
    read_here(variable, prefix, "k")
    np.testing.assert_array_equal(variable, VALUE)
    assert len(sizes) == {1: 4, 100: 2, 1 << 20: 1}[group]


def test_a_variable_whose_value_was_let_go_is_read_whole(host, tmp_path, monkeypatch):
    prefix = written(host, str(tmp_path), PLACEMENTS["whole"])
    monkeypatch.setattr(slices, "GROUP_BYTES", 1)
    variable = tf.Variable(np.zeros_like(VALUE))
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.zeros([0], tf.float64))
    read_here(variable, prefix, "k")
    np.testing.assert_array_equal(variable, VALUE)
