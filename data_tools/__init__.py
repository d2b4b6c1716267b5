"""Command-line tools that make shards of text, describe shards and check them."""
