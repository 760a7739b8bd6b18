"""Checks of transports: a module for each group of requirements, and what they share."""
