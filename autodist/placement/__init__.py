"""Placement: groups of places, and the groups that hold the slices of variables."""
