"""Protocols of other codebases, spoken in front of endpoints of the contract. Knows no engine."""
