"""xscale trains one multilingual encoder on several objectives at once, from sharded text, with DeepSpeed."""

__version__ = "0.2.0"
