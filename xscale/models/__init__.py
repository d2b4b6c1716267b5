"""The encoder and its heads."""
