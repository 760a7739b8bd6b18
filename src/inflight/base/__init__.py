"""Shared utilities, such as threads, entry points, retries and progress lines."""
