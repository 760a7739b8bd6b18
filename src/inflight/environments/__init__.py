"""Environments and agents: conversations whose tokens are exactly those that were sampled, their record, and tools."""
