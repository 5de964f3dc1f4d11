"""Tokens that see everything and that everything sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import LowRankMap, Support
from ..context import Context
from ..errors import require_int
from ..lowrank import Features
from ..selection import Blocks, Layer, Rows


@dataclass(frozen=True)
class GlobalTokens(Support, LowRankMap):
    """The first `count` tokens: their rows and their columns.

    A support (exact there), or a low-rank map: g columns and g rows have rank 2g, written as one-hot features.
    """

    count: int

    def __post_init__(self) -> None:
        require_int(self.count, "count")

    def select(self, ctx: Context, state: Mapping[str, Tensor]) -> tuple[Layer, ...]:
        columns = torch.arange(min(self.count, ctx.m), device=ctx.device)
        rows = torch.arange(min(self.count, ctx.n), device=ctx.device)
        return Blocks(columns[None, None], max(1, ctx.n), 1), Rows(rows[None])

    def factor(self, ctx: Context, state: Mapping[str, Tensor]) -> Features:
        g_k, g_q = min(self.count, ctx.m), min(self.count, ctx.n)
        minus = float("-inf")
        row = torch.arange(ctx.n, device=ctx.device)[:, None]
        key = torch.arange(ctx.m, device=ctx.device)[:, None]
        to_columns = (ctx.q * ctx.scale) @ ctx.k[:, :g_k].mT
        to_columns = to_columns.masked_fill(~ctx.visible[:, None, :g_k], minus)
        is_row = torch.where(row == torch.arange(g_q, device=ctx.device), 0.0, minus).to(ctx.q.dtype)
        is_column = torch.where(key == torch.arange(g_k, device=ctx.device), 0.0, minus).to(ctx.q.dtype)
        from_rows = ((ctx.k * ctx.scale) @ ctx.q[:, :g_q].mT).masked_fill(key < g_k, minus)
        groups = ctx.groups
        log_phi = torch.cat([to_columns, is_row.expand(groups, -1, -1)], -1)
        log_psi = torch.cat([is_column.expand(groups, -1, -1), from_rows], -1)
        return Features(log_phi, log_psi)

    def width(self, dim: int) -> int:
        return 2 * self.count

    def entries(self, n: int, m: int, dim: int, causal: bool) -> float:
        return min(m, self.count + self.count * m / max(1, n))
