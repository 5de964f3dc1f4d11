"""Implementations: `reference` (dense, the truth) and `torch` (any device, memory linear in N)."""
