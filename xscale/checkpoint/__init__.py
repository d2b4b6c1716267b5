"""This package writes a run's checkpoints, removes the old ones and reads them into another run."""
