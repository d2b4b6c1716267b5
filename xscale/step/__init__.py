"""Everything DeepSpeed, and the optimizer step."""
