"""This package has the parts of a training run: its start, its loop, its evaluations and its directory."""
