"""Fine-tuning of exported encoders on sentences, pairs, tags and questions, and transfer between languages."""
