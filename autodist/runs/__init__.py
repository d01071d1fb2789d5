"""A run as one worker sees it: how it starts, what its workers tell one another, its steps' plans, and how it ends."""
