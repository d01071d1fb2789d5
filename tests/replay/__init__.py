"""Replay tests: captured steps in files, the text of their rewritten steps, and the recorded texts."""
