"""The way from shards on disk to micro-batches: index -> order -> mixture -> encode -> masking -> collate -> loader."""
