"""How bytes travel. Each transport has a sender for trainer rank 0 and a receiver for each endpoint rank."""
