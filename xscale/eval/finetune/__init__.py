"""Fine-tuning of exported encoders on sentence pairs, tags and questions, and transfer between languages."""
