"""What is seen of attention: its entropy, where its mass lies, and how far a method is from it. Rows are sampled where there are many."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import require
from ..explain import count_pairs, visible_keys
from ..functional import attention, choose
from ..impl import native
from ..problem import check_inputs, resolve
from .recipe import Recipe

ROWS = 2048  # above so many, rows are sampled
PROBES = 64


@dataclass(frozen=True, kw_only=True)
class Capture:
    """One call of attention: q (B, H, N, D), k and v (B, H', M, D), key_mask as attn_mask takes it or None.

    `pull` (B, H, N, E), as wide as the values, where given, says what the model makes of an error of the output: sensitivity.py.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None = None
    causal: bool = False
    scale: float | None = None
    pull: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("q", "k", "v"):
            t = getattr(self, name)
            ok = isinstance(t, Tensor) and t.dim() == 4
            require(ok, name, "be a (batch, heads, length, width) tensor", getattr(t, "shape", type(t)), "pass what attention is given")
        if self.pull is not None:
            shape = (*self.q.shape[:3], self.v.shape[3])
            fits = isinstance(self.pull, Tensor) and tuple(self.pull.shape) == shape
            require(fits, "pull", f"have the output's shape {shape}", getattr(self.pull, "shape", type(self.pull)), "pass the gradient of the output")

    @property
    def heads(self) -> int:
        return self.q.shape[1]


@dataclass(frozen=True, kw_only=True)
class HeadFit:
    """A head's recipe and what was seen of it. error is relative Frobenius on held-out inputs where there are any;
    entries are those spent, a row; budget their share of the visible ones; masses are shares of the attention, cluster_mass on the
    visited clusters, beyond columns and window. harm is what the head's error does to the model's output (sensitivity.py)."""

    recipe: Recipe
    entropy: float
    error: float
    entries: float
    budget: float
    window_mass: float
    column_mass: float
    cluster_mass: float = math.nan
    harm: float = math.nan


@dataclass(frozen=True)
class Seen:
    """Exact attention of some rows of one capture, (G, R) or (G,) each."""

    rows: Tensor
    norm: Tensor
    probes: Tensor
    probed: Tensor
    entropy: Tensor
    window_mass: Tensor
    column_mass: Tensor


def look(c: Capture, seed: int = 0, window: int = 64, columns: int = 8, limit: int = ROWS) -> Seen:
    """Costs rows x M products a head, at most `limit` x M, one head at a time."""
    p = check_inputs(c.q, c.k, c.v, c.key_mask, 0.0, c.causal, c.scale, c.k.shape[1] != c.q.shape[1])
    groups, n, m, device = p.sizes
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(n) if n <= limit else torch.randperm(n, generator=generator)[:limit].sort().values
    rows = rows.to(device)
    probes = (torch.randint(2, (m, PROBES), generator=generator) * 2 - 1).to(p.k)
    near = (rows[:, None] - torch.arange(m, device=device)).abs() <= window // 2
    parts = []
    for g in range(groups):
        logits = p.q[g, rows] @ p.k[g].mT * p.scale
        hidden = torch.zeros_like(logits, dtype=torch.bool) if p.key_mask is None else ~p.key_mask[g].expand_as(logits)
        if c.causal:
            hidden = hidden | (torch.arange(m, device=device) > rows[:, None])
        weights = torch.nan_to_num(torch.softmax(logits.masked_fill(hidden, -math.inf), -1))
        if p.key_mask is not None and n == m:
            weights = weights * p.key_mask[g, rows, None]
        live = weights.sum().clamp(min=1)
        entropy = torch.special.entr(weights).sum() / live
        heavy = weights.sum(0).topk(min(columns, m)).values.sum() / live
        parts.append((weights.square().sum(), weights @ probes, entropy, (weights * near).sum() / live, heavy))
    norm, probed, entropy, window_mass, column_mass = (torch.stack(x) for x in zip(*parts, strict=True))
    return Seen(rows, norm, probes, probed, entropy, window_mass, column_mass)


def error_of(c: Capture, seen: Seen, method: dict[str, Any]) -> Tensor:
    """(G,) relative Frobenius error of the weights: the expectation of |E x|^2 over random signs x is that of E."""
    b, h = c.q.shape[:2]
    values = seen.probes.expand(b, c.k.shape[1], -1, -1).to(c.q.dtype)
    with torch.no_grad():
        out = attention(c.q, c.k, values, c.key_mask, 0.0, c.causal, c.scale, c.k.shape[1] != h, **method)
    if c.key_mask is not None and c.q.shape[2] == c.k.shape[2]:
        p = check_inputs(c.q, c.k, c.v, c.key_mask, 0.0, c.causal, c.scale, c.k.shape[1] != h)
        assert p.key_mask is not None
        gap = ((out.flatten(0, 1)[:, seen.rows] - seen.probed).square().sum(-1) * p.key_mask[:, seen.rows]).sum(-1) / PROBES
    else:
        gap = (out.flatten(0, 1)[:, seen.rows] - seen.probed).square().sum((-2, -1)) / PROBES
    return (gap / seen.norm.clamp(min=1e-30)).sqrt()


def entries_of(c: Capture, method: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(G,) entries a row that were spent, and those that exact attention spends."""
    p = check_inputs(c.q, c.k, c.v, c.key_mask, 0.0, c.causal, c.scale, c.k.shape[1] != c.q.shape[1])
    with torch.no_grad():
        chosen = resolve(method.get("support"), method.get("low_rank"), None, False, p)
        isa = choose(p, chosen, "auto").isa  # what would run selects for itself
        layers, _ = p.factors(chosen, native.Engine(isa, c.q, c.k, p.scale) if isa else None)
        pairs, visible = count_pairs(p, layers).double(), visible_keys(p).double()
    _, n, m, _ = p.sizes
    rank = 0.0 if chosen.low_rank is None else chosen.low_rank.config.entries(n, m, c.q.shape[3], c.causal)  # type: ignore[attr-defined]
    if p.key_mask is not None and n == m:
        live = p.key_mask.sum(-1).clamp(min=1)
        return (pairs * p.key_mask).sum(-1) / live + rank, (visible * p.key_mask).sum(-1) / live
    return pairs.mean(-1) + rank, visible.mean(-1)


__all__ = ["Capture", "HeadFit", "Seen", "entries_of", "error_of", "look"]
