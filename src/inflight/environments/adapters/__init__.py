"""Environments and agents of other libraries."""
