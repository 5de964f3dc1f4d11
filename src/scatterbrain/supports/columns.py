"""Keys that every query sees: attention sinks and other heavy columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from ..config import Support
from ..context import Context, gather_rows, spread
from ..errors import require, require_int
from ..selection import Blocks, Layer

PAST_BLOCKS = 4  # causal: how many earlier query blocks vote
ROWS_A_BLOCK = 4  # causal: sampled rows in each of them


@dataclass(frozen=True)
class Columns(Support):
    """The `heavy` keys with most attention mass in sampled rows, the `first` keys, and the keys in `index`.

    Not causal: mass over `samples` evenly spread query rows. Causal: each block of queries takes the columns that
    the previous blocks' sampled rows gave most mass, so nothing looks ahead; blocks hold 64 queries up to 2,048
    and grow with the length beyond, so that the cost stays linear.
    """

    heavy: int = 0
    _: KW_ONLY
    first: int = 0
    index: tuple[int, ...] = ()
    samples: int = 32

    def __post_init__(self) -> None:
        require_int(self.heavy, "heavy", least=0)
        require_int(self.first, "first", least=0)
        require_int(self.samples, "samples")
        object.__setattr__(self, "index", tuple(self.index))
        for j in self.index:
            require_int(j, "index", least=0)
        distinct = len(set(self.index)) == len(self.index)
        require(distinct, "index", "hold distinct positions", self.index, "drop the repeated ones")
        require(self.heavy + self.first + len(self.index) > 0, "Columns", "name a column", self, "pass heavy=8 or first=4")

    def select(self, ctx: Context, state: Mapping[str, Tensor]) -> tuple[Layer, ...]:
        fixed = sorted({*range(min(self.first, ctx.m)), *self.index})
        out_of_range = [j for j in fixed if j >= ctx.m]
        require(not out_of_range, "index", f"lie in 0..{ctx.m - 1}", out_of_range, "drop them for keys of this length")
        at = torch.tensor(fixed, dtype=torch.int64, device=ctx.device)
        layers: list[Layer] = [Blocks(at[None, None], max(1, ctx.n), 1)] if fixed else []
        heavy = min(self.heavy, ctx.m - len(fixed))
        if heavy > 0 and ctx.n > 0:
            with torch.no_grad():
                layers.append(self._heavy_past(ctx, at, heavy) if ctx.causal else self._heavy(ctx, at, heavy))
        return tuple(layers)

    def _heavy(self, ctx: Context, fixed: Tensor, heavy: int) -> Layer:
        rows = ctx.query_at(spread(ctx.query_count, self.samples))
        if ctx.engine is not None:
            return Blocks(ctx.engine.columns(ctx, rows[:, None], 0, fixed.tolist(), heavy), ctx.n, 1)
        mass = self._mass(ctx, gather_rows(ctx.q, rows), ctx.visible[:, None]).sum(1)
        value, index = mass.index_fill(-1, fixed, -1.0).masked_fill(~ctx.visible, -1.0).topk(heavy, -1)
        return Blocks(torch.where(value < 0, -1, index)[:, None], ctx.n, 1)

    def _heavy_past(self, ctx: Context, fixed: Tensor, heavy: int) -> Layer:
        block = column_block(ctx.n)
        blocks = -(-ctx.n // block)
        start = torch.arange(blocks, device=ctx.device)[:, None] * block
        offset = (2 * torch.arange(ROWS_A_BLOCK, device=ctx.device) + 1) * block // (2 * ROWS_A_BLOCK)
        rows = (start + offset).reshape(-1).clamp(max=ctx.n - 1)
        if ctx.engine is not None:
            return Blocks(ctx.engine.columns(ctx, rows.view(1, blocks, ROWS_A_BLOCK), PAST_BLOCKS, fixed.tolist(), heavy), block, 1)
        past = torch.arange(ctx.m, device=ctx.device) <= rows[:, None]
        allowed = past[None] & ctx.visible[:, None]
        mass = self._mass(ctx, ctx.q.index_select(1, rows), allowed)
        mass = mass.view(ctx.groups, blocks, ROWS_A_BLOCK, ctx.m).sum(2)
        seen = torch.nn.functional.pad(mass, (0, 0, PAST_BLOCKS, 0))
        votes = sum((seen[:, s : s + blocks] for s in range(PAST_BLOCKS)), torch.zeros_like(mass))
        value, index = votes.index_fill(-1, fixed, -1.0).topk(heavy, -1)
        return Blocks(torch.where(value <= 0, -1, index), block, 1)

    @staticmethod
    def _mass(ctx: Context, q: Tensor, allowed: Tensor) -> Tensor:
        logits = ((q * ctx.scale) @ ctx.k.mT).masked_fill(~allowed, float("-inf"))
        return torch.nan_to_num(torch.softmax(logits, -1))

    def entries(self, n: int, m: int, dim: int, causal: bool) -> float:
        return min(m, self.heavy + self.first + len(self.index))


def column_block(n: int) -> int:
    """Queries a block in the causal estimate."""
    block = 64
    while n > 32 * block:
        block *= 2
    return block
