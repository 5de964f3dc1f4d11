"""What each branch of an approximation contributes: the matrix taken apart into its exact and its low-rank part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import functional
from ..errors import require
from ..impl.reference import dense_mask
from ..problem import check_inputs, resolve
from .oracles import relative_error

IDENTITY_AT_ONCE = 2**25


@dataclass(frozen=True, kw_only=True)
class Branches:
    """exact is softmax attention; got = sparse + low_rank is the approximation; all (B, H, N, M)."""

    exact: Tensor
    sparse: Tensor
    low_rank: Tensor
    support: Tensor

    @property
    def got(self) -> Tensor:
        return self.sparse + self.low_rank

    @property
    def error(self) -> Tensor:
        """(B, H) relative Frobenius."""
        return relative_error(self.got, self.exact)

    @property
    def carried(self) -> Tensor:
        """(B, H, N) weight of a row that the low-rank branch carries."""
        return self.low_rank.sum(-1)

    @property
    def due(self) -> Tensor:
        """(B, H, N) weight that exact attention has there: what the branch ought to carry."""
        return self.exact.masked_fill(self.support, 0.0).sum(-1)


def branches(query: Tensor, key: Tensor, scale: float | None = None, causal: bool = False, **method: Any) -> Branches:
    """query (B, H, N, D), key (B, H, M, D), and what `scatterbrain.attention` takes: a preset, or support and low_rank."""
    require(not method.get("double_count"), "double_count", "be False", True, "a pair counted twice belongs to no single branch")
    got = weights(query, key, scale, causal, **method)
    support = support_mask(query, key, scale, causal, **method)
    return Branches(
        exact=exact(query, key, scale, causal),
        sparse=got.masked_fill(~support, 0.0),
        low_rank=got.masked_fill(support, 0.0),
        support=support,
    )


def exact(query: Tensor, key: Tensor, scale: float | None = None, causal: bool = False) -> Tensor:
    """Softmax attention's matrix (B, H, N, M)."""
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
    return torch.softmax(logits, -1)


def weights(query: Tensor, key: Tensor, scale: float | None = None, causal: bool = False, **method: Any) -> Tensor:
    """The approximation's matrix (B, H, N, M), which is attention to the identity; some heads at a time."""
    (b, h, n, _), m = query.shape, key.shape[2]
    step = max(1, IDENTITY_AT_ONCE // (n * m))
    eye = torch.eye(m, dtype=query.dtype, device=query.device)
    parts = []
    with torch.no_grad():
        for q, k in zip(query.flatten(0, 1).split(step), key.flatten(0, 1).split(step), strict=True):
            value = eye.expand(1, len(q), m, m)
            parts.append(functional.attention(q[None], k[None], value, is_causal=causal, scale=scale, impl="torch", **method)[0])
    return torch.cat(parts).view(b, h, n, m)


def support_mask(query: Tensor, key: Tensor, scale: float | None = None, causal: bool = False, **method: Any) -> Tensor:
    """(B, H, N, M) bool: the pairs that the method weighs exactly."""
    (b, h, n, _), m = query.shape, key.shape[2]
    problem = check_inputs(query, key, key, None, 0.0, causal, scale, False)
    parts = {name: method[name] for name in ("support", "low_rank", "budget") if name in method}
    given = {"support": "default", "low_rank": "default", "budget": None, **parts}
    chosen = resolve(given["support"], given["low_rank"], given["budget"], False, problem)
    mask = torch.zeros(b * h, n, m, dtype=torch.bool, device=query.device)
    for layer in problem.select(chosen, {}):
        for g in range(b * h):
            mask[g] |= dense_mask(_one(layer, g), n, m).to(mask.device).view(-1, n, m)[0]
    if causal:
        mask &= torch.ones(n, m, dtype=torch.bool, device=mask.device).tril()
    return mask.view(b, h, n, m)


def _one(layer: Any, group: int) -> Any:
    """Dense masks of many groups at once would not fit."""
    from ..selection import take_groups

    return take_groups((layer,), group, group + 1)[0]
