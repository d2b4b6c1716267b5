"""xscale: sharded text streams into a DeepSpeed engine that trains one multilingual encoder on many objectives."""

__version__ = "0.1.0"
