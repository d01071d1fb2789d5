"""How often one device is compared with itself, to learn how much rounding alone makes of the order of examples."""

PERMUTATIONS = 4
