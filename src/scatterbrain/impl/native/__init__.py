"""C++ for CPUs: the same methods, without an N x c intermediate in memory."""

from . import library
from .engine import Engine, absent, method_refusal, refusal
from .library import isas

__all__ = ["Engine", "absent", "isas", "library", "method_refusal", "refusal"]
