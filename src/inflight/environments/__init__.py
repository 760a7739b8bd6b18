"""Environments and agents: conversations that keep exactly the sampled tokens, recorded episodes, and tools."""
