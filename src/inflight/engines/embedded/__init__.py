"""The embedded engine: a whole inference server in a few files, correct and readable, fast on a laptop."""
