"""Tensor sharding over a mesh: passes that bring the annotations of a step into a normal form for propagation."""
