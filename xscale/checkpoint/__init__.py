"""This package writes, loads and removes the checkpoints of a run. Other runs can load them too."""
