"""Plots as SVG: a few kinds, drawn alike."""
