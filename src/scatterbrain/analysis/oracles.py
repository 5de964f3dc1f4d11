"""The best that a kind of approximation can do at a budget, told the whole matrix: yardsticks, not methods.

Matrices are (..., N, M), on any device. Entries a row are counted as everywhere here: a sparse entry costs 1, a rank costs a
number for each row and each column, (N + M) / N a row, which is 2 for square matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import require
from .checks import check_matrix

DENSE = 128  # up to here a singular value decomposition costs less than iterating
Tick = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Split:
    """matrix is about sparse + low_rank, both (..., N, M); error (...) is relative Frobenius."""

    sparse: Tensor
    low_rank: Tensor
    error: Tensor
    keys: int
    rank: int

    @property
    def whole(self) -> Tensor:
        return self.sparse + self.low_rank


def rank_cost(shape: Sequence[int]) -> float:
    """Entries a row that one rank costs."""
    return (shape[-2] + shape[-1]) / shape[-2]


def rank_for(entries: float, shape: Sequence[int]) -> int:
    """The rank that so many entries a row buy."""
    return min(int(entries / rank_cost(shape) + 1e-9), *shape[-2:])


def relative_error(got: Tensor, true: Tensor) -> Tensor:
    """Relative Frobenius (...); 1 is what predicting zero gives."""
    norm = true.flatten(-2).norm(dim=-1)
    return (got - true).flatten(-2).norm(dim=-1) / torch.where(norm == 0, 1.0, norm)


def top_k(matrix: Tensor, keys: int) -> Tensor:
    """The `keys` entries of each row that are largest in magnitude; zero elsewhere. The best sparse matrix with such rows."""
    require(keys >= 0, "keys", "be at least 0", keys, "pass entries a row")
    if keys >= matrix.shape[-1]:
        return matrix.clone()
    if keys == 0:
        return torch.zeros_like(matrix)
    index = matrix.abs().topk(keys, -1, sorted=False).indices
    return torch.zeros_like(matrix).scatter_(-1, index, matrix.gather(-1, index))


def truncated_svd(matrix: Tensor, rank: int) -> Tensor:
    """The best matrix of so low a rank (Eckart, Young, Mirsky)."""
    require(rank >= 0, "rank", "be at least 0", rank, "pass a number of singular values")
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    return (u[..., :rank] * s[..., None, :rank]) @ v[..., :rank, :]


def sparse_errors(matrix: Tensor, keys: Sequence[int]) -> Tensor:
    """Relative errors (..., len(keys)) of `top_k`, from one sort."""
    squares = check_matrix(matrix).square().sort(-1).values  # ascending, so that small ones are summed first
    tail = torch.cat([torch.zeros_like(squares[..., :1]), squares.cumsum(-1)], -1).sum(-2)
    left = torch.stack([tail[..., max(0, matrix.shape[-1] - k)] for k in keys], -1)
    return (left / tail[..., -1:]).clamp(min=0).sqrt()


def low_rank_errors(matrix: Tensor, ranks: Sequence[int]) -> Tensor:
    """Relative errors (..., len(ranks)) of `truncated_svd`, from the singular values alone."""
    squares = torch.linalg.svdvals(check_matrix(matrix)).square().flip(-1)
    tail = torch.cat([torch.zeros_like(squares[..., :1]), squares.cumsum(-1)], -1)
    left = torch.stack([tail[..., max(0, squares.shape[-1] - r)] for r in ranks], -1)
    return (left / tail[..., -1:]).clamp(min=0).sqrt()


def sparse_low_rank(
    matrix: Tensor, keys: int, rank: int, *, iterations: int = 20, tolerance: float = 1e-4, start: Tensor | None = None, tick: Tick | None = None
) -> Split:
    """`keys` sparse entries a row and a low-rank part of that rank, by alternating projections: each part in turn is the
    best for what the other leaves (exact on small matrices, one warm block power step on others). It is a local optimum:
    an upper bound on the least error. Stops when no error falls by `tolerance` of itself; keeps each matrix's best.

    `start` is a first low-rank part; without one the sparse part is chosen first.
    """
    check_matrix(matrix)
    require(iterations >= 1, "iterations", "be at least 1", iterations, "pass 20")
    project = _Projection(matrix, rank)
    low = torch.zeros_like(matrix) if start is None else start
    sparse = top_k(matrix - low, keys)
    best = Split(sparse=sparse, low_rank=low, error=relative_error(sparse + low, matrix), keys=keys, rank=rank)
    last = best.error
    for step in range(iterations if rank else 0):
        low = project(matrix - sparse)
        sparse = top_k(matrix - low, keys)
        error = relative_error(sparse + low, matrix)
        better = error < best.error
        pick = better[..., None, None]
        best = Split(
            sparse=torch.where(pick, sparse, best.sparse),
            low_rank=torch.where(pick, low, best.low_rank),
            error=torch.where(better, error, best.error),
            keys=keys,
            rank=rank,
        )
        if tick:
            tick(f"step {step + 1}, error {float(error.mean()):.4f}")
        if step and bool(((last - error) <= tolerance * last).all()):
            break
        last = error
    return best


class _Projection:
    """Onto matrices of a rank; remembers the subspace, so that a slowly moving matrix needs one step each time."""

    def __init__(self, like: Tensor, rank: int) -> None:
        self.rank = rank
        self.dense = min(like.shape[-2:]) <= max(DENSE, 2 * rank)
        self.basis: Tensor | None = None

    def __call__(self, matrix: Tensor) -> Tensor:
        if self.dense:
            return truncated_svd(matrix, self.rank)
        steps = 1
        if self.basis is None:
            generator = torch.Generator().manual_seed(0)
            wide = torch.randn(matrix.shape[-1], self.rank + 8, generator=generator)
            self.basis, steps = wide.to(matrix), 3
        for _ in range(steps):
            left = torch.linalg.qr(matrix @ self.basis).Q
            self.basis = torch.linalg.qr(matrix.mT @ left).Q
        # The small core's singular vectors cut the extra columns off again.
        core = matrix @ self.basis
        u, s, v = torch.linalg.svd(core, full_matrices=False)
        return ((u[..., : self.rank] * s[..., None, : self.rank]) @ v[..., : self.rank, :]) @ self.basis.mT


@dataclass(frozen=True, kw_only=True)
class Mixes:
    """One budget divided differently: errors (..., shares), entries a row for sparse keys and rank at each share."""

    shares: tuple[float, ...]
    keys: tuple[int, ...]
    ranks: tuple[int, ...]
    errors: Tensor

    @property
    def best(self) -> Tensor:
        return self.errors.amin(-1)

    @property
    def best_share(self) -> Tensor:
        return torch.tensor(self.shares, device=self.errors.device)[self.errors.argmin(-1)]


def mixes(matrix: Tensor, entries: float, shares: Sequence[float], *, iterations: int = 20, tick: Tick | None = None) -> Mixes:
    """`sparse_low_rank` at each sparse share of a budget of `entries` a row. 1 is top-k alone, 0 is the SVD alone."""
    check_matrix(matrix)
    require(entries >= 1, "budget", "buy at least one entry a row", f"{entries:.3g}", "raise it")
    require(all(0 <= s <= 1 for s in shares), "shares", "lie in [0, 1]", tuple(shares), "pass sparse shares of the budget")
    found, keys, ranks = [], [], []
    for share in shares:
        rank = rank_for(entries * (1 - share), matrix.shape)
        keep = min(int(entries - rank * rank_cost(matrix.shape) + 1e-9), matrix.shape[-1]) if share else 0
        keys.append(keep)
        ranks.append(rank)
        if not keep:
            found.append(low_rank_errors(matrix, [rank])[..., 0])
        elif not rank:
            found.append(sparse_errors(matrix, [keep])[..., 0])
        else:
            found.append(sparse_low_rank(matrix, keep, rank, iterations=iterations).error)
        if tick:
            tick(f"sparse share {share:g}")
    return Mixes(shares=tuple(shares), keys=tuple(keys), ranks=tuple(ranks), errors=torch.stack(found, -1))
