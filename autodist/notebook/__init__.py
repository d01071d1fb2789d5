"""Training from a notebook: a function goes to new processes, and what it returns comes back."""
