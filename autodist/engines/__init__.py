"""Functions as workers, in processes that another program has started: Ray, Dask, Spark, `multiprocessing`."""
