"""Command-line tools that turn text into shards, and shards into something one can trust."""
