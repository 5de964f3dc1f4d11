"""Nystromformer (Xiong et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from ..config import LowRankMap
from ..context import Context
from ..errors import require_int
from ..lowrank import Features
from .segments import landmarks, log_abs


@dataclass(frozen=True)
class Nystrom(LowRankMap):
    """softmax(q K~') pinv(softmax(Q~ K~')) softmax(Q~ k') with segment-mean landmarks Q~, K~.

    The first softmax is left unnormalised and scaled to M keys, so that the weight stands beside exp(scale q.k).
    The pseudo-inverse is Nystromformer's third-order iteration. Weights are signed.
    """

    features: int
    _: KW_ONLY
    iterations: int = 6

    not_causal = "landmarks are means over the whole sequence, the future included"

    def __post_init__(self) -> None:
        require_int(self.features, "features")
        require_int(self.iterations, "iterations")

    def factor(self, ctx: Context, state: Mapping[str, Tensor]) -> Features:
        q_mark = landmarks(ctx.q, ctx.active, self.features) * ctx.scale
        k_mark = landmarks(ctx.k, ctx.visible, self.features)
        inverse = iterative_inverse(torch.softmax(q_mark @ k_mark.mT, -1), self.iterations)
        logits = (ctx.q * ctx.scale) @ k_mark.mT
        top = logits.amax(-1, keepdim=True).detach()
        phi = torch.exp(logits - top) @ inverse
        mass = (ctx.key_count / self.features).log()[:, None, None].to(ctx.q.dtype)
        b = (q_mark @ ctx.k.mT).masked_fill(~ctx.visible[:, None], float("-inf"))
        any_key = ctx.visible.any(-1)[:, None, None]
        log_psi = torch.log_softmax(torch.where(any_key, b, 0.0), -1).mT
        return Features(log_abs(phi) + top + mass, log_psi, torch.sign(phi.detach()), None)

    def width(self, dim: int) -> int:
        return self.features

    @property
    def signed(self) -> bool:
        return True

    def entries(self, n: int, m: int, dim: int, causal: bool) -> float:
        return 2 * self.features


def iterative_inverse(a: Tensor, iterations: int) -> Tensor:
    """Moore-Penrose inverse of (.., m, m) by Z <- Z (13 I - AZ (15 I - AZ (7 I - AZ))) / 4."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    norms = a.abs().sum(-2).amax(-1) * a.abs().sum(-1).amax(-1)
    z = a.mT / norms[..., None, None]
    for _ in range(iterations):
        az = a @ z
        z = z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az))) / 4
    return z
