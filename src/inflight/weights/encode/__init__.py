"""Weights as bytes: buckets, encodings, checksums, and the memory that weights pass through."""
