"""A checkpoint is compared with the variables to restore: the error lists all differences, with both shapes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist.checkpoint.read import described, require_alike, saved_values
from autodist.errors import CheckpointMismatchError

FLOAT, SHORTER = described([3], tf.float32), described([2], tf.float32)


@pytest.mark.parametrize(
    ("now", "saved", "keys", "optional"),
    [
        ({}, {}, None, set()),
        ({"a": FLOAT}, {"a": FLOAT}, None, set()),
        ({"a": FLOAT}, {"b": FLOAT}, {"a": "b"}, set()),
        ({"a": ""}, {"a": SHORTER}, None, set()),
        ({"a": FLOAT}, {}, None, {"a"}),
        ({}, {"a": FLOAT}, None, {"a"}),
    ],
    ids=["nothing", "alike", "under another key", "any will do", "we alone may have", "it alone may have"],
)
def test_a_checkpoint_of_the_same_values_passes(now, saved, keys, optional):
    require_alike("p", now, saved, keys, optional)


@pytest.mark.parametrize(
    ("now", "saved", "keys", "told"),
    [
        ({"b": FLOAT, "a": FLOAT}, {}, None, (("a", "b"), (), ())),
        ({}, {"b": FLOAT, "a": FLOAT}, None, ((), ("a", "b"), ())),
        ({"a": FLOAT}, {"a": FLOAT}, {}, (("a",), ("a",), ())),
        ({"a": SHORTER}, {"b": FLOAT}, {"a": "b"}, ((), (), ("a (saved (3,) float32, now (2,) float32)",))),
        (
            {"a": described([3], tf.float64)},
            {"a": FLOAT},
            None,
            ((), (), ("a (saved (3,) float32, now (3,) float64)",)),
        ),
    ],
    ids=["missing", "left over", "another under the same key", "another shape", "another dtype"],
)
def test_all_that_differs_is_named(now, saved, keys, told):
    with pytest.raises(CheckpointMismatchError) as raised:
        require_alike("p", now, saved, keys)
    assert (raised.value.missing, raised.value.left_over, raised.value.others) == told


def test_the_listed_content_of_a_checkpoint_excludes_internal_values(tmp_path):
    path = str(tmp_path / "saved")
    values = {"a": np.zeros((2, 3), np.float32), "_AUTODIST/generators/keras": np.zeros(2, np.uint32)}
    tf.raw_ops.SaveV2(
        prefix=path,
        tensor_names=list(values),
        shape_and_slices=["", ""],
        tensors=[tf.constant(v) for v in values.values()],
    )
    assert saved_values(tf.train.load_checkpoint(path)) == {"a": described([2, 3], tf.float32)}
