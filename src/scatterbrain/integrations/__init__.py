"""Other people's models: their attention calls, answered by ours."""

from .convert import calls, convert, restore
from .replace import replace_sdpa

__all__ = ["calls", "convert", "replace_sdpa", "restore"]
