"""What a low-rank map returns: factored weights l_ij, in one of two kinds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Features:
    """l_ij = sum_r sign * exp(log_phi[i, r] + log_psi[j, r]).

    log_phi (G, N, R), log_psi (G, M, R). The signs are None for non-negative features, else of the same shape.
    """

    log_phi: Tensor
    log_psi: Tensor
    sign_phi: Tensor | None = None
    sign_psi: Tensor | None = None


@dataclass(frozen=True)
class Means:
    """l_ij = exp(q_i . mean of j's cluster), times 1 + q' Var q / 2 at order 2 (q scaled).

    node (G, M) is the cluster of each key, -1 for none; `nodes` their number. Not causal: chunk and inner are 0.
    Causal: clusters live inside chunks of `chunk` keys, each of nodes / chunks clusters, and serve later chunks
    only; inside a chunk, blocks of `inner` keys serve later blocks by their mean; inside a block keys stand alone.
    With `offset` (G, M), l_ij = exp(q_i . mean + offset_j) and means are weighted by exp(offset); `offset_in` likewise for
    the inner blocks. Both are constants to the gradient.
    """

    node: Tensor
    nodes: int
    order: int = 1
    chunk: int = 0
    inner: int = 0
    offset: Tensor | None = None
    offset_in: Tensor | None = None


LowRank = Features | Means
