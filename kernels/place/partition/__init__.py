"""Partition variables: variables cut into shards, which every later kernel sees as variables of their own."""

from autodist.kernels.place.partition.partition_variables import PartitionVariables

__all__ = ["PartitionVariables"]
