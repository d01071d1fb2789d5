"""Partitioned variables: variables cut into shards, which every later kernel treats as separate variables."""

from autodist.kernels.place.partition.partition_variables import PartitionVariables

__all__ = ["PartitionVariables"]
