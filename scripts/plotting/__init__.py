"""SVG plots of a few kinds, in one style."""
