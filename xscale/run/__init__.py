"""A run: its start, its training loop, its evaluations and its directory."""
