"""Differences between versions of Keras, as the installed and other ones have them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from keras.distribution import DataParallel, DeviceMesh

from autodist.tf_compat import keras_versions
from autodist.tf_compat.keras_versions import layout_of, matches_layout_key, shards_dataset


@pytest.mark.parametrize("is_new, expected", [(True, [True, False, False]), (False, [True, True, False])])
def test_a_key_of_a_layout_map_matches_a_whole_path_or_in_older_versions_a_part(
    monkeypatch: pytest.MonkeyPatch, is_new: bool, expected: list[bool]
) -> None:
    monkeypatch.setattr(keras_versions, "has_package", lambda package, lowest: is_new)
    assert [matches_layout_key(key, "a/dense/kernel") for key in (".*kernel", "dense", "^dense")] == expected


def test_variables_of_versions_without_layouts_have_none() -> None:
    assert (layout_of(SimpleNamespace()), layout_of(SimpleNamespace(_layout="a"))) == (None, "a")


@pytest.mark.parametrize("shards", [True, False])
def test_a_distribution_says_if_keras_divides_data_sets_under_either_name(shards: bool) -> None:
    made = DataParallel(device_mesh=DeviceMesh((1,), ["batch"], ["cpu:0"]), auto_shard_dataset=shards)
    assert shards_dataset(made) is shards
    assert shards_dataset(SimpleNamespace(_auto_shard_dataset=shards)) is shards
