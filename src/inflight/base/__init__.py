"""Shared utilities: threads, entry points, retries, progress lines."""
