"""Buckets: the fusion of reductions, and the equality of packed and unpacked values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from autodist.graph.editor import GraphEditor
from autodist.graph.parts import PendingReduction, PendingReductionKind
from autodist.graph.subgraph import subgraph
from autodist.kernels.communicate.buckets import Bucket, key_of, make_buckets
from autodist.placement.group import Group

WORKERS = Group.of_workers([0, 1])


def part(name, shape=(3,), dtype=tf.float32, weight="w:0", level=1, kind=PendingReductionKind.GRADIENT, group=WORKERS):
    return PendingReduction(
        name, kind, (f"{name}:0",), (f"{name}:0",), weight, level, dtype, tf.TensorShape(shape), group, name
    )


def names(buckets):
    return [[j.name for j in b.reductions] for b in buckets]


def no_group(_):
    return 0


def test_no_reductions_make_no_buckets():
    assert make_buckets([], no_group) == []


def test_the_last_gradient_goes_first():
    assert names(make_buckets([part("a"), part("b")], no_group)) == [["b", "a"]]


def test_a_bucket_is_closed_before_it_is_too_large():
    reductions = [part(n, (100,)) for n in "abcde"]
    assert names(make_buckets(reductions, no_group, 1000)) == [["e", "d"], ["c", "b"], ["a"]]


def test_a_reduction_that_is_larger_than_a_bucket_goes_alone():
    assert names(make_buckets([part("a"), part("b", (1000,)), part("c")], no_group, 100)) == [["c"], ["b"], ["a"]]


def test_reductions_of_another_dtype_weight_level_or_kind_are_in_other_buckets():
    reductions = [
        part("a"),
        part("b", dtype=tf.float64),
        part("c", weight=None),
        part("d", level=2),
        part("e", kind=PendingReductionKind.STATE),
        part("f"),
    ]
    assert sorted(map(sorted, names(make_buckets(reductions, no_group)))) == [["a", "f"], ["b"], ["c"], ["d"], ["e"]]


def test_fusion_groups_are_apart():
    assert names(make_buckets([part("a"), part("b"), part("c")], lambda j: j.name == "b")) == [["c", "a"], ["b"]]


def test_groups_are_apart_and_have_keys_of_their_own():
    rows = [Group.of_workers([0, 1]), Group.of_workers([0, 2])]
    reductions = [part("a"), part("b", group=rows[1]), part("c", group=rows[0])]
    assert names(make_buckets(reductions, no_group)) == [["c", "a"], ["b"]]
    assert len({key_of([part("a", group=group)]) for group in rows}) == 2


SHAPES = st.lists(st.sampled_from([(), (1,), (3,), (16,), (4, 4), (2, 3, 5), (0,), (17,)]), min_size=1, max_size=6)


@settings(max_examples=30)
@given(SHAPES, st.sampled_from([tf.float16, tf.float32, tf.float64]), st.integers(1, 4))
def test_packed_values_are_unpacked_unchanged_and_pieces_have_the_whole_length(shapes, dtype, count):
    bucket = Bucket(tuple(part(f"t{k}", shape, dtype) for k, shape in enumerate(shapes)))
    editor = GraphEditor(tf.compat.v1.GraphDef())
    for one in bucket.reductions:
        node = tf.compat.v1.NodeDef(name=one.name, op="Placeholder")
        node.attr["dtype"].type = dtype.as_datatype_enum
        editor.add(node)
    with subgraph(editor, "b") as f:
        flat = bucket.pack(f)
        whole = [tf.identity(t) for t in bucket.unpack(f, flat)]
    assert flat.shape.as_list() == [sum(bucket.lengths)]
    assert sum(bucket.cut(count)) == sum(bucket.lengths) and len(bucket.cut(count)) == count
    assert all(piece % bucket.step == 0 for piece in bucket.cut(count))
    values = [np.random.default_rng(k).normal(size=s).astype(dtype.as_numpy_dtype) for k, s in enumerate(shapes)]
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(editor.to_graph_def(), name="")
    with tf.compat.v1.Session(graph=graph) as session:
        found = session.run([f.name(t) for t in whole], {f"t{k}:0": v for k, v in enumerate(values)})
    for one, other in zip(found, values, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.shape == other.shape


def test_keys_tell_reductions_apart_and_nothing_else():
    assert key_of([part("a")]) == key_of([part("a", weight="other:0")])
    assert len({key_of([part("a")]), key_of([part("b")]), key_of([part("a", (4,))]), key_of([part("a", level=2)])}) == 4
    # Two successive models with the same variable names may have different numbers.
    rows = [replace(part("a"), local=("a:0", "a:1"), index_dtype=dtype) for dtype in (tf.int32, tf.int64)]
    assert len({key_of([part("a")]), *(key_of([one]) for one in rows)}) == 3
