"""Looks at real queries and keys, measures, and says how each head should be computed."""

from typing import TYPE_CHECKING, Any

from .fit import fit
from .measure import Capture, HeadFit
from .recipe import Recipe

if TYPE_CHECKING:
    from .adaptive import Adaptive, Movement


def __getattr__(name: str) -> Any:
    """What converts models is imported when it is asked for: integrations imports recipes from here."""
    if name not in ("Adaptive", "Movement"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import adaptive

    return getattr(adaptive, name)


__all__ = ["Adaptive", "Capture", "HeadFit", "Movement", "Recipe", "fit"]
