"""Input sharding: the part of a data set of global batches that a worker reads, by rows or by files."""
