"""The run: an actor keeps the endpoints full, workers train on fresh groups, and publishes never stop sampling."""
