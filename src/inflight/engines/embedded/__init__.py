"""The embedded engine: a complete inference server in a few files, readable and fast enough for a laptop."""
