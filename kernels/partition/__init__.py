"""Partition: variables cut into shards, which every later kernel sees as variables of their own."""

from autodist.kernels.partition.kernel import Partition

__all__ = ["Partition"]
