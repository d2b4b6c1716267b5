"""Fine-tuning of an exported encoder: sentence pairs, tags, extractive questions; what transfers between languages."""
