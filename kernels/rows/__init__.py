"""Rows of tables: accesses of a large variable by rows remain accesses by rows throughout the rewrite."""
