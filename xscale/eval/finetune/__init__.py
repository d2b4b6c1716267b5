"""Fine-tunes exported encoders on sentences, pairs, tags and questions, and measures transfer between languages."""
