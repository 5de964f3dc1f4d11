"""Robust PCA: principal component pursuit (Candes et al. 2011) by the inexact augmented Lagrangian (Lin, Chen, Ma 2010).

minimise |L|_* + lambda |S|_1 subject to L + S = M, for a batch of matrices, on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import require
from .checks import check_matrix
from .oracles import Split, rank_cost, relative_error, top_k, truncated_svd

GROWTHS = (1.2, 1.05, 1.01)  # of the penalty; 1.5 is usual, and stops short of the optimum where recovery is hard
FARTHEST = 1e7
GAP = 1e-3
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-5}
Tick = Callable[[int, float], None]


@dataclass(frozen=True, kw_only=True)
class Pursuit:
    """low_rank and sparse (..., N, M). residual is |M - L - S| / |M|, gap the relative duality gap: both bound how far the
    answer is from the optimum, whatever happened on the way; converged says that both are small."""

    low_rank: Tensor
    sparse: Tensor
    residual: Tensor
    gap: Tensor
    iterations: Tensor
    converged: Tensor

    @property
    def rank(self) -> Tensor:
        """Numerical: singular values over 1e-4 of the largest."""
        s = torch.linalg.svdvals(self.low_rank)
        return (s > 1e-4 * s[..., :1]).sum(-1)

    @property
    def density(self) -> Tensor:
        """Share of sparse entries over 1e-4 of the largest."""
        size = self.sparse.abs()
        return (size > 1e-4 * size.amax((-2, -1), keepdim=True)).double().mean((-2, -1))


def usual_weight(matrix: Tensor) -> float:
    """lambda: 1 / sqrt(max(N, M)), for which the theory promises exact recovery."""
    return float(max(matrix.shape[-2:]) ** -0.5)


def robust_pca(
    matrix: Tensor,
    weight: float | None = None,
    *,
    tolerance: float | None = None,
    gap: float = GAP,
    growths: tuple[float, ...] = GROWTHS,
    iterations: int = 1000,
    tick: Tick | None = None,
) -> Pursuit:
    """Principal component pursuit. `weight` is lambda; `tick` hears of each iteration and the worst residual.

    A penalty that grows fast makes L + S = M long before the objective is least: a feasible answer, and a wrong one. The
    duality gap tells, and matrices whose gap is above `gap` are done again with the next, slower growth.
    """
    check_matrix(matrix)
    known = matrix.dtype in TOLERANCE
    require(known, "matrix", "be float32 or float64", matrix.dtype, "cast it: singular values need the precision")
    weight = usual_weight(matrix) if weight is None else weight
    require(weight > 0, "weight", "be positive", weight, "pass 1 / sqrt(max(N, M))")
    require(bool(growths) and min(growths) > 1, "growths", "be above 1", growths, "pass (1.2, 1.05, 1.01)")
    tolerance = TOLERANCE[matrix.dtype] if tolerance is None else tolerance
    flat = matrix.flatten(0, -3) if matrix.dim() > 2 else matrix[None]
    done = _pursue(flat, weight, tolerance, growths[0], iterations, tick)
    for growth in growths[1:]:
        again = torch.nonzero(done.gap > gap).flatten()
        if not len(again):
            break
        redone = _pursue(flat[again], weight, tolerance, growth, iterations, tick)
        for name in ("low_rank", "sparse", "residual", "gap"):
            getattr(done, name)[again] = getattr(redone, name)
        done.iterations[again] += redone.iterations
    shape = matrix.shape[:-2]
    return Pursuit(
        low_rank=done.low_rank.view_as(matrix),
        sparse=done.sparse.view_as(matrix),
        residual=done.residual.view(shape),
        gap=done.gap.view(shape),
        iterations=done.iterations.view(shape),
        converged=((done.residual <= tolerance) & (done.gap <= gap)).view(shape),
    )


def _pursue(flat: Tensor, weight: float, tolerance: float, growth: float, iterations: int, tick: Tick | None) -> Pursuit:
    state = _State(flat, weight, growth)
    count = torch.zeros(flat.shape[0], dtype=torch.int64, device=flat.device)
    for step in range(1, iterations + 1):
        active = torch.nonzero(state.residual > tolerance).flatten()
        if not len(active):
            break
        state.step(active)
        count[active] = step
        if tick:
            tick(step, float(state.residual.max()))
    below = state.residual <= tolerance
    return Pursuit(low_rank=state.low, sparse=state.sparse, residual=state.residual, gap=state.gap(), iterations=count, converged=below)


class _State:
    """All matrices (G, N, M) at once; a step touches those that have not converged."""

    def __init__(self, matrix: Tensor, weight: float, growth: float) -> None:
        self.matrix, self.weight, self.growth = matrix, weight, growth
        self.norm = matrix.flatten(1).norm(dim=1)
        spectral = torch.linalg.svdvals(matrix)[:, 0]
        largest = matrix.abs().amax((1, 2))
        scale = torch.maximum(spectral, largest / weight).clamp(min=torch.finfo(matrix.dtype).tiny)
        self.dual = matrix / scale[:, None, None]
        self.mu = 1.25 / spectral.clamp(min=torch.finfo(matrix.dtype).tiny)
        self.farthest = self.mu * FARTHEST
        self.low, self.sparse = torch.zeros_like(matrix), torch.zeros_like(matrix)
        self.residual = (self.norm > 0).to(matrix.dtype)

    def step(self, some: Tensor) -> None:
        matrix, dual, mu = self.matrix[some], self.dual[some], self.mu[some][:, None, None]
        u, s, v = torch.linalg.svd(matrix - self.sparse[some] + dual / mu, full_matrices=False)
        low = (u * (s[:, None] - 1 / mu).clamp(min=0)) @ v
        rest = matrix - low + dual / mu
        sparse = rest - rest.clamp(-self.weight / mu, self.weight / mu)
        left = matrix - low - sparse
        self.low[some], self.sparse[some] = low, sparse
        self.dual[some] = dual + mu * left
        self.mu[some] = torch.minimum(self.mu[some] * self.growth, self.farthest[some])
        self.residual[some] = left.flatten(1).norm(dim=1) / self.norm[some]

    def gap(self) -> Tensor:
        """The dual of pursuit: the most of <Y, M> over spectral norm <= 1 and entries <= lambda; Y is scaled into that set."""
        if not float(self.norm.max()):
            return torch.zeros_like(self.norm)
        primal = torch.linalg.svdvals(self.low).sum(-1) + self.weight * self.sparse.abs().sum((1, 2))
        outside = torch.maximum(torch.linalg.svdvals(self.dual)[:, 0], self.dual.abs().amax((1, 2)) / self.weight).clamp(min=1)
        dual = (self.dual * self.matrix).sum((1, 2)) / outside
        return (primal - dual) / primal.clamp(min=torch.finfo(primal.dtype).tiny)


def at_budget(found: Pursuit, matrix: Tensor, entries: float, steps: int = 6) -> Split:
    """The pursuit's answer cut to a budget, each matrix's best of several cuts: its low-rank part to a rank, then the largest
    entries of what that leaves."""
    cost, best = rank_cost(matrix.shape), None
    most = int(entries / cost)
    for rank in sorted({round(most * i / steps) for i in range(steps + 1)}):
        low = truncated_svd(found.low_rank, rank)
        keys = int(entries - rank * cost + 1e-9)
        sparse = top_k(matrix - low, keys)
        cut = Split(sparse=sparse, low_rank=low, error=relative_error(sparse + low, matrix), keys=keys, rank=rank)
        best = cut if best is None else _better(best, cut)
    assert best is not None
    return best


def _better(a: Split, b: Split) -> Split:
    """Matrix by matrix; keys and rank are those of the cut that is best on average."""
    pick = (b.error < a.error)[..., None, None]
    first = b if float(b.error.mean()) < float(a.error.mean()) else a
    return Split(
        sparse=torch.where(pick, b.sparse, a.sparse),
        low_rank=torch.where(pick, b.low_rank, a.low_rank),
        error=torch.minimum(a.error, b.error),
        keys=first.keys,
        rank=first.rank,
    )
