"""Former module paths and names that a builder of a script may import."""

from __future__ import annotations

import importlib

import pytest

from autodist import strategies


@pytest.mark.parametrize(
    ("path", "name", "current"),
    [
        ("all_reduce_options", "AllReduceOptions", strategies.AllReduceOptions),
        ("cut", "even_sizes", strategies.even_sizes),
        ("cut", "shards_of", strategies.shards_of),
        ("links", "link_bytes", strategies.link_bytes),
        ("served", "served_nodes", strategies.ps_load_balancing.balanced_server_nodes),
        ("server_options", "ServerOptions", strategies.ServerOptions),
    ],
)
def test_a_former_path_still_has_its_names(path, name, current):
    assert getattr(importlib.import_module(f"autodist.strategies.{path}"), name) is current


def test_a_partitioning_may_be_called_cut():
    assert strategies.Cut is strategies.Partitioning
