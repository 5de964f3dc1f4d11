"""BigBird's random part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from ..config import Support
from ..context import Context
from ..errors import require_int
from ..random import uniform_grid
from ..selection import Blocks, Layer


@dataclass(frozen=True)
class RandomBlocks(Support):
    """Each block of queries sees `blocks` distinct key blocks, one from each of `blocks` strata as equal as can be.

    Causal: drawn from the blocks up to the query's own. The draw depends on the seed and the block alone, and
    spans the visible keys. Unlike BigBird's, random blocks may fall on window or global ones; such pairs count once.
    """

    blocks: int
    _: KW_ONLY
    block: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        require_int(self.blocks, "blocks")
        require_int(self.block, "block")
        require_int(self.seed, "seed", least=0)

    def select(self, ctx: Context, state: Mapping[str, Tensor]) -> tuple[Layer, ...]:
        rows = torch.arange(max(1, -(-ctx.n // self.block)), device=ctx.device)[:, None]
        stratum = torch.arange(self.blocks, device=ctx.device)
        drawn = uniform_grid(rows, stratum, self.seed).to(torch.float64)
        total = (ctx.key_extent + self.block - 1) // self.block
        if ctx.key_mask is None:
            total = total[:1]
        span = total[:, None, None].expand(-1, rows.shape[0], 1)
        if ctx.causal:
            span = torch.minimum(span, rows + 1)
        first, end = stratum * span // self.blocks, (stratum + 1) * span // self.blocks
        index = first + (drawn * (end - first)).to(torch.int64)
        return (Blocks(torch.where(end > first, index, -1), self.block, self.block),)

    def entries(self, n: int, m: int, dim: int, causal: bool) -> float:
        return min(m / 2 if causal else m, self.blocks * self.block)
