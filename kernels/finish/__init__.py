"""Prunes, places and compiles the rewritten step."""
