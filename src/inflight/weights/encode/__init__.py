"""The bytes of weights: buckets, encodings, checksums, and the memory that they pass through."""
