"""Matrix Class 1, Theorem 1 and the two separation examples of Chen et al. 2021, as measurements."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import require, require_int
from .oracles import sparse_low_rank

Tick = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Membership:
    """How far inputs (n, d) meet Matrix Class 1 with l = 1 / (1 - delta^2). Shares are of the pairs named."""

    worst_norm: float  # largest | |z| - 1 | / delta
    within: float  # pairs of one cluster, two tokens, with z.z' in [1/l, 2 - 1/l]
    diagonal: float  # |z|^2 in the same range
    across: float  # pairs of two clusters with z.z' in [-delta, delta]
    widest: float  # largest |z.z'| / delta of two clusters
    positive: float  # pairs of two clusters with z.z' in [0, delta]
    block_share: float  # share of all entries inside clusters: o(1) is asked for
    delta_log_d: float  # o(1) is asked for

    @property
    def holds(self) -> bool:
        """The conditions on single entries, all pairs."""
        return self.within == 1 and self.across == 1


def membership(z: Tensor, label: Tensor, delta: float) -> Membership:
    """z (n, d) with the cluster of each row (n,)."""
    require(0 < delta < 1, "delta", "lie in (0, 1)", delta, "pass the spread of a cluster beside unit centres")
    z = z.double()
    gram, same = z @ z.mT, label[:, None] == label
    diagonal = torch.eye(len(z), dtype=torch.bool)
    low, high = 1 - delta**2, 1 + delta**2
    inside = (gram >= low) & (gram <= high)
    apart = gram[~same]
    return Membership(
        worst_norm=float((z.norm(dim=-1) - 1).abs().max()) / delta,
        within=_share(inside[same & ~diagonal]),
        diagonal=_share(inside[diagonal]),
        across=_share(apart.abs() <= delta),
        widest=float(apart.abs().max()) / delta,
        positive=_share((apart >= 0) & (apart <= delta)),
        block_share=_share(same),
        delta_log_d=delta * math.log(z.shape[1]),
    )


def _share(mask: Tensor) -> float:
    return float(mask.double().mean()) if mask.numel() else 1.0


def taylor_degree(reach: float, error: float) -> int:
    """The least degree at which exp's Taylor polynomial is within `error` on [-reach, reach]; its worst place is the right end."""
    require(reach > 0 and error > 0, "reach and error", "be positive", (reach, error), "pass the largest logit and 0.01")
    terms = [math.exp(i * math.log(reach) - math.lgamma(i + 1)) for i in range(1, int(10 * reach) + 200)]
    tail, degree = 0.0, len(terms)
    while degree and tail + terms[degree - 1] <= error:
        tail += terms[degree - 1]
        degree -= 1
    return degree


@dataclass(frozen=True, kw_only=True)
class KindErrors:
    """Frobenius errors of the best found of each kind, at equal parameters, and the matrix's own norm."""

    low_rank: float
    sparse: float
    both: float
    norm: float


def kind_errors(matrix: Tensor, entries: int) -> KindErrors:
    """Of a symmetric matrix (n, n) at `entries` a row. Low-rank (rank entries / 2) and sparse (`entries` keys) are optimal;
    both is the best of those two and of an eighth, a half and all but one rank given to keys.
    """
    require_int(entries, "entries", least=8)
    norm = float(matrix.norm())
    tail = symmetric_tail(matrix)
    squares = matrix.square().sort(-1).values
    sparse = float(squares[:, : max(0, matrix.shape[-1] - entries)].sum().sqrt())
    keys = (entries // 8, entries // 2, entries - 2)
    both = min(float(sparse_low_rank(matrix, k, (entries - k) // 2, iterations=12, tolerance=1e-3).error) for k in keys) * norm
    low = float(tail[min(entries // 2, len(tail) - 1)])
    return KindErrors(low_rank=low, sparse=sparse, both=min(both, low, sparse), norm=norm)


def symmetric_tail(matrix: Tensor) -> Tensor:
    """(n + 1,) Frobenius error of the best symmetric approximation of each rank 0..n."""
    size = torch.linalg.eigvalsh(matrix).abs().sort().values.square()
    return torch.cat([torch.zeros_like(size[:1]), size.cumsum(0)]).flip(0).sqrt()


def sign_matrix(n: int, d: int, length: float, generator: torch.Generator) -> Tensor:
    """Rows with entries +-sqrt(length / d), so that each has squared norm `length`: the examples' Q."""
    signs = torch.randint(2, (n, d), generator=generator, dtype=torch.int8).double() * 2 - 1
    return signs * math.sqrt(length / d)


def largest_overlap(q: Tensor) -> float:
    """Largest |q_i.q_j| of two rows."""
    gram = q @ q.mT
    return float(gram.fill_diagonal_(0).abs().max())


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Numbers stored to reach an error: n a rank (both factors are the same in a symmetric matrix), 1 a sparse entry."""

    low_rank: int
    sparse: int
    both: int
    both_error: float


def needs(matrix: Tensor, target: float, diagonal: float) -> Needs:
    """Fewest parameters with Frobenius error at most `target`. `both` is what is left when `diagonal` is taken off the
    diagonal, at its best rank, and those n numbers."""
    n = len(matrix)
    squares = matrix.flatten().square().sort().values.cumsum(0)
    kept = len(squares) - int((squares <= target**2).sum())
    rest_tail = symmetric_tail(matrix - diagonal * torch.eye(n, dtype=matrix.dtype))
    both = int((rest_tail > target).sum())
    return Needs(
        low_rank=n * int((symmetric_tail(matrix) > target).sum()), sparse=kept, both=n * (1 + both), both_error=float(rest_tail[min(both, n)])
    )
