"""Replicates the compute part, and reduces the values that the replicas compute."""
