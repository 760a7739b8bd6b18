"""Checks of trainer workers: a module for each group of requirements, and what they share."""
