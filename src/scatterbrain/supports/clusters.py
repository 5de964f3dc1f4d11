"""Content-based groups: the Routing Transformer's, and per-query routing to key clusters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from ..clustering import chunk_clusters, key_clusters, kmeans, segment_mean
from ..config import Support
from ..context import Context
from ..errors import require, require_int
from ..fitted import check_fit, fitted_chunks, fitted_clusters
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

    fit="queries" forms clusters by what queries can tell apart (fitted.py). With a `gain` as well a query visits every
    cluster, at most `top` of them, where log(share of a key in the query's mass * spread of the keys' logits) is estimated
    to be at least that: peaked rows spend more, and `keys` only says what is spent on the mean. A tuple holds a gain a head.
    """

    top: int
    _: KW_ONLY
    clusters: int = 64
    keys: int | None = None
    iterations: int = 4
    chunk: int = 256
    per_chunk: int = 16
    fit: str = "keys"
    gain: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("top", "clusters", "chunk", "per_chunk"):
            require_int(getattr(self, name), name)
        require_int(self.iterations, "iterations", least=0)
        if self.keys is not None:
            require_int(self.keys, "keys")
        check_fit(self.fit)
        if self.gain is not None:
            gains = self.gain if isinstance(self.gain, tuple) and self.gain else (self.gain,)
            numbers = all(isinstance(g, (int, float)) and not isinstance(g, bool) and math.isfinite(g) for g in gains)
            rule = "be a finite number, a tuple of one a head, or None"
            require(numbers, "gain", rule, self.gain, "pass a log of probability, such as gain=-6.0")
            require(self.fit == "queries", "gain", "come with fit='queries'", f"fit={self.fit!r}", "pass both, or neither")
        require(self.top <= self.clusters, "top", "be at most clusters", self.top, f"pass top<={self.clusters}")

    def select(self, ctx: Context, state: Mapping[str, Tensor]) -> tuple[Layer, ...]:
        routes = self.routes(ctx)
        if ctx.engine is not None:
            return (routes if ctx.lazy else ctx.engine.routes(ctx, routes),)
        with torch.no_grad():
            mean, mass, count = node_means(ctx.k, routes)
            step = max(1, ROUTES_AT_ONCE // max(1, ctx.groups * routes.nodes))
            parts = [self._route(ctx, first, step, routes, mean, mass, count) for first in range(0, max(1, ctx.n), step)]
        return (Buckets(torch.cat(parts, 1), routes.k_label),)

    def routes(self, ctx: Context) -> Routes:
        chunk = self.chunk if ctx.causal else 0
        if self.fit == "queries":
            f = fitted_chunks(ctx, chunk, self.per_chunk, self.iterations) if chunk else fitted_clusters(ctx, self.clusters, self.iterations)
            by_gain = (None, None) if self.gain is None else (f.worth, self._gains(ctx) - f.reach)
            return Routes(f.label, f.nodes, min(self.top, f.nodes), self.keys, chunk, f.offset, *by_gain)
        if chunk:
            label, nodes = chunk_clusters(ctx, chunk, self.per_chunk, self.iterations)
        else:
            label, nodes = key_clusters(ctx, self.clusters, self.iterations), self.clusters
        return Routes(label, nodes, min(self.top, nodes), self.keys, chunk)

    def _gains(self, ctx: Context) -> Tensor:
        """(1, 1), or (G, 1) where heads have their own."""
        assert self.gain is not None
        if not isinstance(self.gain, tuple):
            return torch.full((1, 1), self.gain, device=ctx.device, dtype=ctx.k.dtype)
        known = len(self.gain) == ctx.heads
        require(known, "gain", f"hold one number for each of {ctx.heads} heads", len(self.gain), "pass as many, or a single number for all")
        return torch.tensor(self.gain, device=ctx.device, dtype=ctx.k.dtype).repeat(ctx.groups // ctx.heads)[:, None]

    def _route(self, ctx: Context, first: int, step: int, routes: Routes, mean: Tensor, mass: Tensor, count: Tensor) -> Tensor:
        q = ctx.q[:, first : first + step] * ctx.scale
        score = q @ mean.mT + mass[:, None]
        if ctx.causal:
            row = torch.arange(first, first + q.shape[1], device=q.device)
            chunk_of_node = torch.arange(mean.shape[1], device=q.device) // self.per_chunk
            score = score.masked_fill(chunk_of_node >= (row // self.chunk)[:, None], float("-inf"))
        if routes.worth is not None and routes.least is not None:
            share = score - torch.logsumexp(score, -1, keepdim=True)
            value, index = (share + routes.worth[:, None]).nan_to_num(nan=float("-inf")).topk(min(self.top, score.shape[-1]), -1)
            return torch.where((value >= routes.least[:, first : first + step, None]) & ~torch.isneginf(value), index, -1)
        value, index = score.topk(min(self.top, score.shape[-1]), -1)
        taken = ~torch.isneginf(value)
        if self.keys is not None:
            size = torch.gather(count, 1, index.flatten(1)).view(index.shape)
            taken &= size.cumsum(-1) - size / 2 <= self.keys
        return torch.where(taken, index, -1)

    def entries(self, n: int, m: int, dim: int, causal: bool) -> float:
        mean = self.top * (self.chunk / self.per_chunk if causal else m / self.clusters)
        return min(m / 2 if causal else m, mean, float("inf") if self.keys is None else self.keys)


def node_means(k: Tensor, routes: Routes) -> tuple[Tensor, Tensor, Tensor]:
    """Means (G, nodes, D), log masses and counts (G, nodes): keys weigh exp(offset) where there is one."""
    if routes.offset is None:
        mean, count = segment_mean(k, routes.k_label, routes.nodes)
        return mean, torch.log(count), count
    at = torch.where(routes.k_label < 0, routes.nodes, routes.k_label)
    top = routes.offset.new_full((k.shape[0], routes.nodes + 1), float("-inf")).scatter_reduce(1, at, routes.offset, "amax")
    weight = torch.exp(routes.offset - top.gather(1, at))
    both, count = segment_mean(torch.cat([weight[..., None] * k, weight[..., None]], -1), routes.k_label, routes.nodes)
    share = both[..., -1:]
    return both[..., :-1] / share.clamp(min=1e-30), torch.log(share[..., 0] * count) + top[:, : routes.nodes], count
