"""The optimizer step, and the setup of DeepSpeed for it."""
