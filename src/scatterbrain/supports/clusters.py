"""Content-based groups: the Routing Transformer's, and per-query routing to key clusters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from ..clustering import chunk_clusters, key_clusters, kmeans, segment_mean
from ..config import Support
from ..context import Context
from ..errors import require, require_int
from ..selection import Buckets, Groups, Layer, Routes

ROUTES_AT_ONCE = 2**22


@dataclass(frozen=True)
class Clusters(Support):
    """Spherical k-means on queries and keys together; each cluster joins its `size` nearest queries and keys.

    As in the Routing Transformer (Roy et al. 2021): clusters are balanced by taking the top `size` of each side,
    so a token may sit in several clusters, or in none. Centroids are fitted to the input.
    """

    clusters: int
    _: KW_ONLY
    size: int = 64
    iterations: int = 5

    not_causal = "the top members of a cluster are chosen over the whole sequence, so a later token can push an earlier one out"

    def __post_init__(self) -> None:
        require_int(self.clusters, "clusters")
        require_int(self.size, "size")
        require_int(self.iterations, "iterations", least=0)

    def select(self, ctx: Context, state: Mapping[str, Tensor]) -> tuple[Layer, ...]:
        with torch.no_grad():
            q = torch.nn.functional.normalize(ctx.q, dim=-1)
            k = torch.nn.functional.normalize(ctx.k, dim=-1)
            both, mask = torch.cat([q, k], 1), torch.cat([ctx.active, ctx.visible], 1)
            centres, _ = segment_mean(both, kmeans(both, mask, self.clusters, self.iterations), self.clusters)
            centres = torch.nn.functional.normalize(centres, dim=-1)
            return (Groups(self._members(q, ctx.active, centres), self._members(k, ctx.visible, centres)),)

    def _members(self, x: Tensor, mask: Tensor, centres: Tensor) -> Tensor:
        score = (centres @ x.mT).masked_fill(~mask[:, None], float("-inf"))
        value, index = score.topk(min(self.size, x.shape[1]), -1)
        return torch.where(torch.isneginf(value), -1, index)

    def entries(self, n: int, m: int, dim: int, causal: bool) -> float:
        return min(m, self.clusters * min(self.size, n) / max(1, n) * self.size)


@dataclass(frozen=True)
class Routed(Support):
    """Each query sees the keys of the `top` clusters with most estimated mass, count * exp(q . mean).

    Clusters differ in size: `keys` is what a query may spend on them; they are taken in order while half of the
    next one still fits, so the mean stays near `keys`.
    Causal: clusters are formed inside chunks of `chunk` keys (`per_chunk` clusters each) and only those of earlier
    chunks are open. With equal settings ClusterMeans shares the clusters.
    """

    top: int
    _: KW_ONLY
    clusters: int = 64
    keys: int | None = None
    iterations: int = 4
    chunk: int = 256
    per_chunk: int = 16

    def __post_init__(self) -> None:
        for name in ("top", "clusters", "chunk", "per_chunk"):
            require_int(getattr(self, name), name)
        require_int(self.iterations, "iterations", least=0)
        if self.keys is not None:
            require_int(self.keys, "keys")
        require(self.top <= self.clusters, "top", "be at most clusters", self.top, f"pass top<={self.clusters}")

    def select(self, ctx: Context, state: Mapping[str, Tensor]) -> tuple[Layer, ...]:
        if ctx.causal:
            label, nodes = chunk_clusters(ctx, self.chunk, self.per_chunk, self.iterations)
        else:
            label, nodes = key_clusters(ctx, self.clusters, self.iterations), self.clusters
        if ctx.engine is not None:
            routes = Routes(label, nodes, min(self.top, nodes), self.keys, self.chunk if ctx.causal else 0)
            return (routes if ctx.lazy else ctx.engine.routes(ctx, routes),)
        with torch.no_grad():
            mean, count = segment_mean(ctx.k, label, nodes)
            step = max(1, ROUTES_AT_ONCE // max(1, ctx.groups * nodes))
            parts = [self._route(ctx, first, step, mean, count) for first in range(0, max(1, ctx.n), step)]
        return (Buckets(torch.cat(parts, 1), label),)

    def _route(self, ctx: Context, first: int, step: int, mean: Tensor, count: Tensor) -> Tensor:
        q = ctx.q[:, first : first + step] * ctx.scale
        score = q @ mean.mT + torch.log(count)[:, None]
        if ctx.causal:
            row = torch.arange(first, first + q.shape[1], device=q.device)
            chunk_of_node = torch.arange(mean.shape[1], device=q.device) // self.per_chunk
            score = score.masked_fill(chunk_of_node >= (row // self.chunk)[:, None], float("-inf"))
        value, index = score.topk(min(self.top, score.shape[-1]), -1)
        taken = ~torch.isneginf(value)
        if self.keys is not None:
            size = torch.gather(count, 1, index.flatten(1)).view(index.shape)
            taken &= size.cumsum(-1) - size / 2 <= self.keys
        return torch.where(taken, index, -1)

    def entries(self, n: int, m: int, dim: int, causal: bool) -> float:
        mean = self.top * (self.chunk / self.per_chunk if causal else m / self.clusters)
        return min(m / 2 if causal else m, mean, float("inf") if self.keys is None else self.keys)
