"""The Linear Transformer's kernel (Katharopoulos et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import LowRankMap
from ..context import Context
from ..lowrank import Features


@dataclass(frozen=True)
class EluPlusOne(LowRankMap):
    """phi(x) = elu(x) + 1. A kernel of its own, not an estimate of exp(scale q.k), so `scale` touches the support only."""

    def factor(self, ctx: Context, state: Mapping[str, Tensor]) -> Features:
        return Features(_log_elu_plus_one(ctx.q), _log_elu_plus_one(ctx.k))

    def width(self, dim: int) -> int:
        return dim

    def entries(self, n: int, m: int, dim: int, causal: bool) -> float:
        return 2 * dim


def _log_elu_plus_one(x: Tensor) -> Tensor:
    return torch.where(x > 0, torch.log1p(x.clamp(min=0)), x)
