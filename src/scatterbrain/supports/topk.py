"""The quadratic oracle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import Support
from ..context import Context
from ..errors import require_int
from ..selection import Blocks, Layer

LOGITS_AT_ONCE = 2**24


@dataclass(frozen=True)
class TopK(Support):
    """Each query's `k` largest visible entries. Looks at all N x M logits: a yardstick, not a method."""

    k: int

    def __post_init__(self) -> None:
        require_int(self.k, "k")

    def select(self, ctx: Context, state: Mapping[str, Tensor]) -> tuple[Layer, ...]:
        step = max(1, LOGITS_AT_ONCE // max(1, ctx.groups * ctx.m))
        key = torch.arange(ctx.m, device=ctx.device)
        parts = []
        with torch.no_grad():
            for first in range(0, max(1, ctx.n), step):
                q = ctx.q[:, first : first + step] * ctx.scale
                seen = ctx.visible[:, None]
                if ctx.causal:
                    row = torch.arange(first, first + q.shape[1], device=q.device)
                    seen = seen & (key <= row[:, None])
                value, index = (q @ ctx.k.mT).masked_fill(~seen, float("-inf")).topk(min(self.k, ctx.m), -1)
                parts.append(torch.where(torch.isneginf(value), -1, index))
        return (Blocks(torch.cat(parts, 1), 1, 1),)

    def entries(self, n: int, m: int, dim: int, causal: bool) -> float:
        return min(m, self.k)
