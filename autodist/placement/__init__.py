"""Placement: the groups of places that exchange tensors."""
