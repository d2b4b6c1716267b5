"""The data path, from shards on disk to packed rows: shards -> order -> mixture -> loader -> stream batch -> row."""
