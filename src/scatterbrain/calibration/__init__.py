"""Looks at real queries and keys, measures, and says how each head should be computed."""

from .adaptive import Adaptive, Movement
from .fit import fit
from .measure import Capture, HeadFit
from .recipe import Recipe

__all__ = ["Adaptive", "Capture", "HeadFit", "Movement", "Recipe", "fit"]
