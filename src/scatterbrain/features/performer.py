"""Random features for the softmax kernel (Choromanski et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from ..config import Draw, LowRankMap
from ..context import Context
from ..errors import require, require_int
from ..lowrank import Features

KINDS = ("positive", "cosh", "trig")


@dataclass(frozen=True)
class Performer(LowRankMap):
    """phi(x) = exp(w.x - |x|^2 / 2) / sqrt(m), so that phi(q).phi(k) is an unbiased estimate of exp(scale q.k).

    `features` is m, all told: "cosh" uses m/2 projections w and their negatives, "trig" m/2 sines and as many
    cosines (signed, so rows can cancel: fit only for small norms). `orthogonal` draws the w in orthogonal blocks.
    """

    features: int
    _: KW_ONLY
    kind: str = "positive"
    orthogonal: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        require_int(self.features, "features")
        require_int(self.seed, "seed", least=0)
        require(self.kind in KINDS, "kind", f"be one of {', '.join(KINDS)}", self.kind, "pick one of them")
        paired = self.kind == "positive" or self.features % 2 == 0
        require(paired, "features", f"be even for kind={self.kind!r}", self.features, f"pass {self.features + 1}")

    def draw(self, head_dim: int, draw: Draw) -> dict[str, Tensor]:
        rows = self.features if self.kind == "positive" else self.features // 2
        if not self.orthogonal:
            return {"projection": draw.normal(rows, head_dim)}
        blocks = -(-rows // head_dim)
        directions = draw.rotations(blocks, head_dim).reshape(-1, head_dim)[:rows]
        lengths = draw.normal(rows, head_dim, stream=1).norm(dim=-1, keepdim=True)
        return {"projection": directions * lengths}

    def factor(self, ctx: Context, state: Mapping[str, Tensor]) -> Features:
        root = math.sqrt(abs(ctx.scale))
        q, k = ctx.q * math.copysign(root, ctx.scale), ctx.k * root
        (log_phi, sign_phi), (log_psi, sign_psi) = (self._features(x, state["projection"]) for x in (q, k))
        return Features(log_phi, log_psi, sign_phi, sign_psi)

    def _features(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor | None]:
        wx = x @ w.mT
        half = x.square().sum(-1, keepdim=True) / 2
        if self.kind == "positive":
            return wx - (half + math.log(self.features) / 2), None
        if self.kind == "cosh":
            return torch.cat([wx, -wx], -1) - (half + math.log(self.features) / 2), None
        wave = torch.cat([torch.cos(wx), torch.sin(wx)], -1)
        tiny = torch.finfo(wave.dtype).tiny
        return torch.log(wave.abs().clamp(min=tiny)) + (half - math.log(self.features // 2) / 2), torch.sign(wave.detach())

    def width(self, dim: int) -> int:
        return self.features

    @property
    def signed(self) -> bool:
        return self.kind == "trig"

    def entries(self, n: int, m: int, dim: int, causal: bool) -> float:
        return 2 * self.features
