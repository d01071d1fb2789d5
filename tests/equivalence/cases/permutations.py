"""Runs of one device against itself, with examples in another order, to measure the effect of rounding alone."""

PERMUTATIONS = 4
