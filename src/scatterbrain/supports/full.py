"""Everything: softmax attention as a corner of the library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ..config import Support
from ..context import Context
from ..selection import Band, Layer


@dataclass(frozen=True)
class Full(Support):
    """Every visible pair."""

    def select(self, ctx: Context, state: Mapping[str, Tensor]) -> tuple[Layer, ...]:
        return (Band(None, None),)

    def entries(self, n: int, m: int, dim: int, causal: bool) -> float:
        return (m + 1) / 2 if causal else m
