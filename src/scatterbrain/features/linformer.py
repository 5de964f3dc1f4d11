"""Linformer (Wang et al. 2020): keys and values projected along the sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..config import Draw, LowRankMap
from ..context import Context
from ..errors import require, require_int
from ..lowrank import Features
from .segments import log_abs, segment_of


@dataclass(frozen=True)
class Linformer(LowRankMap):
    """l_ij = (M / m) sum_r exp(scale q_i.(F k)_r) F_rj, with one F (m x M) for keys and values.

    Without `length`, F averages m equal stretches of the visible keys: any length, nothing to learn. With `length`,
    F is a signed N(0, 1/m) matrix for up to that many keys, learnable in a module; its rows are shifted to sum to
    one over the visible keys, so that Linformer's own normaliser is the sum of the weights and padding has no part.
    """

    features: int
    _: KW_ONLY
    length: int | None = None
    seed: int = 0

    not_causal = "each projected key mixes the whole sequence, the future included"
    learned: ClassVar[tuple[str, ...]] = ("projection",)

    def __post_init__(self) -> None:
        require_int(self.features, "features")
        require_int(self.seed, "seed", least=0)
        if self.length is not None:
            require_int(self.length, "length")

    def draw(self, head_dim: int, draw: Draw) -> dict[str, Tensor]:
        if self.length is None:
            return {}
        return {"projection": draw.normal(self.features, self.length) / math.sqrt(self.features)}

    def factor(self, ctx: Context, state: Mapping[str, Tensor]) -> Features:
        f = self._pooling(ctx) if self.length is None else self._projection(ctx, state["projection"])
        mass = (ctx.key_count / self.features).log()[:, None, None].to(ctx.q.dtype)
        empty = (f == 0).all(-1)[:, None]
        log_phi = ((ctx.q * ctx.scale) @ (f @ ctx.k).mT + mass).masked_fill(empty, float("-inf"))
        sign = None if self.length is None else torch.sign(f.detach()).mT
        return Features(log_phi, log_abs(f).mT, None, sign)

    def _pooling(self, ctx: Context) -> Tensor:
        segment = segment_of(ctx.visible, self.features)
        member = (segment[:, None] == torch.arange(self.features, device=segment.device)[:, None]).to(ctx.q.dtype)
        return member / member.sum(-1, keepdim=True).clamp(min=1)

    def _projection(self, ctx: Context, projection: Tensor) -> Tensor:
        require(ctx.m <= (self.length or 0), "length", f"cover the {ctx.m} keys", self.length, f"use Linformer({self.features}, length={ctx.m})")
        seen = ctx.visible[:, None].to(ctx.q.dtype)
        f = projection[:, : ctx.m] * seen
        return (f + (1 - f.sum(-1, keepdim=True)) / ctx.key_count[:, None, None]) * seen

    def width(self, dim: int) -> int:
        return self.features

    @property
    def signed(self) -> bool:
        return self.length is not None

    def entries(self, n: int, m: int, dim: int, causal: bool) -> float:
        return 2 * self.features
