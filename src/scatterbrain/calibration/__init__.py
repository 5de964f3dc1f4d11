"""Looks at real queries and keys, measures, and says how each head should be computed."""

from .fit import fit
from .measure import Capture, HeadFit
from .recipe import Recipe

__all__ = ["Capture", "HeadFit", "Recipe", "fit"]
