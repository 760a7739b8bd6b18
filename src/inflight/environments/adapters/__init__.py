"""Environments and agents from other libraries."""
