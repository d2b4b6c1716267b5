"""This package writes a run's checkpoints, removes old ones and loads them, also into other runs."""
