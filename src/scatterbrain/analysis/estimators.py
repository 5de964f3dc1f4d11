"""Theorem 2 of Chen et al. 2021: bias and variance of one entry exp(q.k), for unit q and k, in closed form and by Monte Carlo.

The Monte Carlo runs the core's own feature map and hash, so that it tests them and not a second copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..context import Context
from ..errors import require, require_int
from ..features import Performer
from ..supports import LSH
from ..supports.lsh import cross_polytope

NUMBERS_AT_ONCE = 2**25
Tick = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Of the estimates of each entry: mean, its standard error, and variance, (T,) each."""

    mean: Tensor
    mean_error: Tensor
    variance: Tensor
    draws: int


def performer_variance(dots: Tensor, features: int) -> Tensor:
    """Closed form for independent positive features: (exp(|q + k|^2) - 1) exp(2 q.k) / m, with |q + k|^2 = 2 + 2 q.k."""
    return torch.expm1(2 + 2 * dots) * torch.exp(2 * dots) / features


def entry_errors(dots: Tensor, hit: Tensor, features: int) -> dict[str, Tensor]:
    """Mean squared error of an entry that a hash finds with probability `hit`."""
    variance = performer_variance(dots, features)
    return {"reformer": (1 - hit) * torch.exp(2 * dots), "performer": variance, "scatterbrain": (1 - hit) * variance}


def asymptotic_hit(dots: Tensor, dim: int) -> Tensor:
    """The theorem's p without its ln ln d term: exp(-tau^2 / (4 - tau^2) ln d), tau = |q - k|; 0 for opposite vectors."""
    square = (2 - 2 * dots).clamp(min=0)
    return torch.where(square < 4, torch.exp(-square / (4 - square).clamp(min=1e-12) * math.log(dim)), 0.0)


def any_round(hit: Tensor, rounds: int, functions: int = 1) -> Tensor:
    """Probability of agreeing in all functions of at least one round."""
    return 1 - (1 - hit**functions) ** rounds


def pair(dots: Sequence[float], dim: int) -> tuple[Tensor, Tensor]:
    """Unit q, k (T, dim) with these inner products."""
    t = torch.tensor(dots, dtype=torch.float32)
    require(bool((t.abs() <= 1).all()), "dots", "lie in [-1, 1]", list(dots), "unit vectors have no others")
    require_int(dim, "dim", least=2)
    q, k = torch.zeros(2, len(t), dim)
    q[:, 0], k[:, 0], k[:, 1] = 1.0, t, (1 - t.double().square()).clamp(min=0).sqrt().float()
    return q, k


def performer_moments(dots: Sequence[float], dim: int, features: int, draws: int, *, orthogonal: bool = False, seed: int = 0) -> Moments:
    """Monte Carlo over `draws` independent feature maps of `features` each."""
    whole = not orthogonal or features % dim == 0
    require(whole, "features", f"be a multiple of the width {dim} for orthogonal ones", features, f"pass {dim}")
    q, k = pair(dots, dim)
    step = max(1, NUMBERS_AT_ONCE // (features * max(dim, len(dots))))
    parts = []
    for first in range(0, draws, step):
        some = min(step, draws - first)
        parts.append(_estimates(q, k, features, some, orthogonal, seed * 1_000_003 + first))
    estimates = torch.cat(parts, -1)
    variance = estimates.var(-1)
    return Moments(mean=estimates.mean(-1), mean_error=(variance / draws).sqrt(), variance=variance, draws=draws)


def _estimates(q: Tensor, k: Tensor, features: int, draws: int, orthogonal: bool, seed: int) -> Tensor:
    """(T, draws): one wide map is many narrow ones side by side, since its features are drawn alike."""
    config = Performer(features * draws, orthogonal=orthogonal, seed=seed)
    map_ = config.sample(q.shape[-1])
    found = config.factor(Context(q[None], k[None], 1.0, False, None), map_.state)
    terms = torch.exp((found.log_phi + found.log_psi)[0].double()) * draws
    return terms.unflatten(-1, (draws, features)).sum(-1)


def measured_hits(dots: Sequence[float], dim: int, rotations: int, seed: int = 0) -> Tensor:
    """(T,) share of pairs that one cross-polytope hash puts together. A rotation of the space serves dim / 2 pairs, each in
    a plane of its own."""
    t = torch.tensor(dots, dtype=torch.float32)
    side = (1 - t.double().square()).clamp(min=0).sqrt().float()
    eye = torch.eye(dim)
    q, other = eye[0::2][: dim // 2], eye[1::2]
    k = t[:, None, None] * q + side[:, None, None] * other
    hits, step = torch.zeros(len(t), dtype=torch.float64), max(1, NUMBERS_AT_ONCE // (dim * dim))
    for first in range(0, rotations, step):
        some = min(step, rotations - first)
        drawn = LSH(some, scheme="cross_polytope", bucket=None, seed=seed * 1_000_003 + first).sample(dim).state["rotation"]
        for r in range(some):
            hits += (cross_polytope(q, drawn[r])[None] == cross_polytope(k, drawn[r])).double().mean(-1)
    return hits / rotations


def scatterbrain_moments(dots: Sequence[float], dim: int, features: int, draws: int, *, rounds: int = 1, seed: int = 0) -> Moments:
    """Monte Carlo of the whole estimator: the exact weight where the hash finds the pair, the features' elsewhere."""
    q, k = pair(dots, dim)
    exact = torch.exp((q.double() * k.double()).sum(-1))
    parts, step = [], max(1, NUMBERS_AT_ONCE // (dim * max(features, dim) * rounds))
    for first in range(0, draws, step):
        some = min(step, draws - first)
        estimates = _estimates(q, k, features, some, False, seed * 1_000_003 + first)
        drawn = LSH(some * rounds, scheme="cross_polytope", bucket=None, seed=seed * 1_000_003 + 500_001 + first).sample(dim).state["rotation"]
        same = torch.stack([cross_polytope(q, r) == cross_polytope(k, r) for r in drawn], -1).unflatten(-1, (some, rounds)).any(-1)
        parts.append(torch.where(same, exact[:, None], estimates))
    found = torch.cat(parts, -1)
    variance = found.var(-1)
    return Moments(mean=found.mean(-1), mean_error=(variance / draws).sqrt(), variance=variance, draws=draws)
