"""Placement and partitioning of variables on workers."""
