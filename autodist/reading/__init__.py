"""What a worker reads of a data set of global batches: rows of its own, or files of its own."""
