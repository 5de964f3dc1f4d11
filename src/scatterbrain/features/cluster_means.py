"""Keys replaced by the mean of their cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from ..clustering import chunk_clusters, key_clusters
from ..config import LowRankMap
from ..context import Context
from ..errors import require, require_int
from ..fitted import block_offsets, check_fit, fitted_chunks, fitted_clusters
from ..lowrank import Means


@dataclass(frozen=True)
class ClusterMeans(LowRankMap):
    """l_ij = exp(scale q_i.mean(c(j))) over `clusters` k-means clusters of the keys.

    order=2 multiplies by 1 + scale^2 q' Var q / 2 with the cluster's diagonal variance: the mean of exp to second
    order. Causal: clusters are formed inside chunks of `chunk` keys, `per_chunk` each, and serve later chunks;
    inside a chunk, means of `inner` consecutive keys serve later blocks, and a block's own keys stand for themselves.
    fit="queries" forms clusters by what queries can tell apart, and weighs the keys of each as the mean query does
    (fitted.py): l_ij = exp(scale q_i.mean(c(j)) + offset_j), at the same cost.
    """

    clusters: int
    _: KW_ONLY
    order: int = 1
    iterations: int = 4
    chunk: int = 256
    per_chunk: int = 16
    inner: int = 32
    fit: str = "keys"

    def __post_init__(self) -> None:
        for name in ("clusters", "chunk", "per_chunk", "inner"):
            require_int(getattr(self, name), name)
        require_int(self.iterations, "iterations", least=0)
        require(self.order in (1, 2), "order", "be 1 or 2", self.order, "use order=1 for plain means")
        check_fit(self.fit)
        require(self.order == 1 or self.fit == "keys", "order", "be 1 with fit='queries'", self.order, "it sees the spread already: drop order")
        divides = self.chunk % self.inner == 0
        require(divides, "inner", f"divide chunk={self.chunk}", self.inner, "pass a divisor, such as inner=32")

    def factor(self, ctx: Context, state: Mapping[str, Tensor]) -> Means:
        if self.fit == "queries":
            return self._fitted(ctx)
        if not ctx.causal:
            return Means(key_clusters(ctx, self.clusters, self.iterations), self.clusters, self.order)
        label, nodes = chunk_clusters(ctx, self.chunk, self.per_chunk, self.iterations)
        return Means(label, nodes, self.order, self.chunk, self.inner)

    def _fitted(self, ctx: Context) -> Means:
        if not ctx.causal:
            f = fitted_clusters(ctx, self.clusters, self.iterations)
            return Means(f.label, f.nodes, offset=f.offset)
        f = fitted_chunks(ctx, self.chunk, self.per_chunk, self.iterations)
        return Means(f.label, f.nodes, 1, self.chunk, self.inner, f.offset, block_offsets(ctx, self.inner))

    def entries(self, n: int, m: int, dim: int, causal: bool) -> float:
        if not causal:
            return min(m, self.clusters * (1.5 if self.order == 2 else 1))
        past = max(0, m - self.chunk) / 2 * self.per_chunk / self.chunk
        inside = (min(m, self.chunk) / self.inner - 1) / 2 + (min(m, self.inner) + 1) / 2
        return past + max(0.0, inside)
