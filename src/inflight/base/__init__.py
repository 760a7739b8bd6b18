"""Code without a subject of its own: threads, entry points, retries, progress lines."""
