"""Looks at real queries and keys, measures, and says how each head should be computed."""

from .recipe import Recipe

__all__ = ["Recipe"]
