"""The folder on disk: append-only segments, their index log, collection."""
