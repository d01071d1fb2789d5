"""Reads the metrics of a run, here or on another machine, and shows them for `autodist top` and `report`."""
