"""The two factorised patterns of the Sparse Transformer (Child et al. 2019), heads merged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from ..config import Support
from ..context import Context
from ..errors import require, require_int
from ..selection import Band, Blocks, Buckets, Layer


@dataclass(frozen=True)
class Strided(Support):
    """The `stride` nearest keys (past ones when causal, both sides otherwise) and every stride-th key."""

    stride: int

    def __post_init__(self) -> None:
        require_int(self.stride, "stride")

    def select(self, ctx: Context, state: Mapping[str, Tensor]) -> tuple[Layer, ...]:
        q_label = torch.arange(ctx.n, device=ctx.device) % self.stride
        k_label = torch.arange(ctx.m, device=ctx.device) % self.stride
        band = Band(-self.stride, 0 if ctx.causal else self.stride)
        return band, Buckets(q_label[None, :, None], k_label[None])

    def entries(self, n: int, m: int, dim: int, causal: bool) -> float:
        near, far = (self.stride + 1, m / self.stride / 2) if causal else (2 * self.stride + 1, m / self.stride)
        return min(m, near + far)


@dataclass(frozen=True)
class Fixed(Support):
    """The keys of the query's own block of `stride`, and the last `tail` keys of every block."""

    stride: int
    _: KW_ONLY
    tail: int = 1

    def __post_init__(self) -> None:
        require_int(self.stride, "stride")
        require_int(self.tail, "tail")
        require(self.tail <= self.stride, "tail", "be at most stride", self.tail, f"pass tail<={self.stride}")

    def select(self, ctx: Context, state: Mapping[str, Tensor]) -> tuple[Layer, ...]:
        device = ctx.device
        q_label = torch.arange(ctx.n, device=device) // self.stride
        k_pos = torch.arange(ctx.m, device=device)
        blocks = torch.arange(-(-ctx.m // self.stride), device=device)[:, None] * self.stride
        summary = (blocks + torch.arange(self.stride - self.tail, self.stride, device=device)).reshape(-1)
        summary = torch.where(summary < ctx.m, summary, -1)
        own = Buckets(q_label[None, :, None], (k_pos // self.stride)[None])
        return own, Blocks(summary[None, None], max(1, ctx.n), 1)

    def entries(self, n: int, m: int, dim: int, causal: bool) -> float:
        full = min(m, self.stride + self.tail * (m // self.stride))
        return full / 2 if causal else full
