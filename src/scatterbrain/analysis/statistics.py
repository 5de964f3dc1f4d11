"""Entropy, correlation and exponents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import require

TESTS = ("spearman", "pearson", "kendall")


def entropy(attention: Tensor) -> Tensor:
    """Nats (...) of the rows of (..., N, M), mean over rows: 0 where each row has one weight, log M where all are equal."""
    return torch.special.entr(attention.clamp(min=0)).sum(-1).mean(-1)


@dataclass(frozen=True, kw_only=True)
class Correlation:
    test: str
    coefficient: float
    p_value: float


def correlations(x: Sequence[float] | Tensor, y: Sequence[float] | Tensor) -> list[Correlation]:
    """Spearman's, Pearson's and Kendall's coefficients with their p-values. Needs scipy."""
    from scipy import stats

    a, b = (torch.as_tensor(t, dtype=torch.float64).flatten() for t in (x, y))
    require(len(a) == len(b) and len(a) >= 3, "x and y", "have the same length, at least 3", (len(a), len(b)), "pass one number a matrix in each")
    spread = bool(a.max() > a.min()) and bool(b.max() > b.min())
    require(spread, "x and y", "vary", "a constant", "a correlation of a constant is not defined")
    run: dict[str, Any] = {"spearman": stats.spearmanr, "pearson": stats.pearsonr, "kendall": stats.kendalltau}
    found = [(name, run[name](a.numpy(), b.numpy())) for name in TESTS]
    return [Correlation(test=name, coefficient=float(r.statistic), p_value=float(r.pvalue)) for name, r in found]


@dataclass(frozen=True, kw_only=True)
class Exponent:
    """y is about factor x^power; error is the power's standard error (0 for two points)."""

    power: float
    factor: float
    error: float


def exponent(x: Sequence[float], y: Sequence[float]) -> Exponent:
    """Least squares in logarithms."""
    ok = len(x) == len(y) >= 2 and all(v > 0 and math.isfinite(v) for v in (*x, *y))
    require(ok, "x and y", "hold at least two positive finite numbers each", (list(x), list(y)), "drop the others")
    a, b = (torch.tensor(t, dtype=torch.float64).log() for t in (x, y))
    u, v = a - a.mean(), b - b.mean()
    require(float(u.square().sum()) > 0, "x", "vary", list(x), "measure at two sizes or more")
    power = float((u * v).sum() / u.square().sum())
    left = float((v - power * u).square().sum())
    error = math.sqrt(left / (len(x) - 2) / float(u.square().sum())) if len(x) > 2 else 0.0
    return Exponent(power=power, factor=math.exp(float(b.mean() - power * a.mean())), error=error)
