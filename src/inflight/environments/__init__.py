"""Environments and agents: conversations that keep exactly the sampled tokens, their recording, and tools."""
