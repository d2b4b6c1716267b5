"""Checkpoints: what is written, which stay, and how another run reads them."""
