"""The asynchronous run: an actor samples groups, trainer ranks train on them, and publishes update the servers."""
