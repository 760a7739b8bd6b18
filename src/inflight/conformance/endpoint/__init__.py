"""Checks of inference endpoints: a module for each group of requirements, and what they share."""
