"""Optional packages and other things a laboratory may lack, each missed in one line."""

from __future__ import annotations

import importlib
from typing import Any


class LabError(Exception):
    """Something outside the program is missing; the message is one line that names the remedy."""


def need(module: str, extra: str = "demo") -> Any:
    """Import an optional module, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise LabError(f"{error.name} is not installed; run: pip install 'scatterbrain[{extra}]'") from None
