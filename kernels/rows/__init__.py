"""Rows of tables: what a step reads and writes of a large variable by rows stays rows."""
