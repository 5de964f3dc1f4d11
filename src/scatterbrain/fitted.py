"""Clusters of keys as queries tell them apart.

Only q.k counts, and of it only what differs between the keys of a row. So keys are compared by the mean of (q.(k - k'))^2 around
the mean query, and inside a cluster each key weighs what the mean query would give it, exp(qm.k_j), not the same. A cluster whose
keys differ by s2 in the mean of (q - qm).(k_j - mean) squared has a larger mean of exp, by about exp(s2 / 2):

    l_ij = exp(q_i.mean_c + offset_j),   offset_j = qm.(k_j - mean_c) + s2_c / 2,   mean_c weighted by exp(offset_j)

The row sum of l is that of softmax at the mean query, whatever the clusters; plain means are the case qm = 0, s2 = 0.
Causal: each chunk's clusters are fitted to the queries of that chunk, and serve later chunks only. No gradient flows into offsets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .clustering import TWO_LEVELS_FROM, kmeans, two_level_kmeans
from .context import Context
from .errors import require

FITS = ("keys", "queries")
SLACK = 1e-2  # of the queries' mean variance, added in every direction: few queries span few of them


def check_fit(fit: str) -> None:
    require(fit in FITS, "fit", f"be one of {', '.join(FITS)}", fit, "use fit='keys' for plain clusters of keys")


@dataclass(frozen=True)
class Fitted:
    """label (G, M) of `nodes` clusters, offset (G, M); worth (G, nodes): log of a key's spread over the cluster's size;
    reach (G, N): log of how far a query is from the mean one."""

    label: Tensor
    nodes: int
    offset: Tensor
    worth: Tensor
    reach: Tensor


def fitted_clusters(ctx: Context, clusters: int, iterations: int) -> Fitted:
    """Over all keys; remembered, so that routing and means share them."""
    with torch.no_grad():
        found: Fitted = ctx.remember(("fitted", clusters, iterations), lambda: _fit(ctx, clusters, iterations, 0))
    return found


def fitted_chunks(ctx: Context, chunk: int, per_chunk: int, iterations: int) -> Fitted:
    """Causal: inside each chunk of keys."""
    with torch.no_grad():
        found: Fitted = ctx.remember(("fitted chunks", chunk, per_chunk, iterations), lambda: _fit(ctx, per_chunk, iterations, chunk))
    return found


def block_offsets(ctx: Context, block: int) -> Tensor:
    """offset (G, M) of keys inside blocks of `block` positions, by the mean query of the block itself; s2 = 0."""

    def make() -> Tensor:
        parts = -(-ctx.m // block)
        mean = _mean(_cut(_live(ctx), parts, block), _cut(ctx.active[..., None], parts, block)[..., 0])
        k, seen = _cut(ctx.k, parts, block), _cut(ctx.visible[..., None], parts, block)[..., 0]
        logit = (k @ mean[..., None])[..., 0].masked_fill(~seen, -torch.inf)
        share = torch.nan_to_num(torch.softmax(logit, -1))
        offset = logit - (share * logit.masked_fill(~seen, 0.0)).sum(-1, keepdim=True)
        return offset.masked_fill(~seen, 0.0).reshape(ctx.groups, -1)[:, : ctx.m]

    with torch.no_grad():
        found: Tensor = ctx.remember(("block offsets", block), make)
    return found


def _fit(ctx: Context, clusters: int, iterations: int, chunk: int) -> Fitted:
    """Every chunk (the whole length where chunk is 0) is a family of its own, (G * C, chunk, D)."""
    width = chunk or max(1, ctx.m)
    parts = -(-ctx.m // width)
    rows = width if chunk else max(1, ctx.n)
    active = _cut(ctx.active[..., None], parts, rows)[..., 0].flatten(0, 1)
    q = _cut(_live(ctx), parts, rows).flatten(0, 1)
    mean = _mean(q, active)
    apart = q - mean[:, None]
    if ctx.key_mask is not None or ctx.n % rows:
        apart.masked_fill_(~active[..., None], 0.0)
    among = apart.mT @ apart / active.sum(-1).clamp(min=1)[:, None, None]
    k, seen = _cut(ctx.k, parts, width).flatten(0, 1), _cut(ctx.visible[..., None], parts, width)[..., 0].flatten(0, 1)
    x = k @ _root(among)
    label = _labels(ctx, x, seen, clusters, iterations, chunk)
    offset, spread, size = _offsets((k @ mean[..., None])[..., 0], x, label, seen, clusters)
    worth = (spread.clamp(min=1e-12).log() / 2 - size.clamp(min=1).log()).view(ctx.groups, -1)
    place = torch.arange(parts, device=label.device).repeat(ctx.groups)[:, None] * clusters
    label = torch.where(label < 0, -1, label + place).view(ctx.groups, -1)[:, : ctx.m].contiguous()
    offset = offset.view(ctx.groups, -1)[:, : ctx.m].contiguous()
    reach = _reach(ctx, mean.view(ctx.groups, parts, -1), among.view(ctx.groups, parts, *among.shape[1:]), chunk)
    return Fitted(label, parts * clusters, offset, worth.contiguous(), reach)


def _cut(x: Tensor, parts: int, width: int) -> Tensor:
    """(G, L, D) -> (G, parts, width, D): zeros behind, what is beyond dropped."""
    total = parts * width
    if total > x.shape[1]:  # padding by nothing would be a copy
        x = torch.nn.functional.pad(x, (0, 0, 0, total - x.shape[1]))
    return x[:, :total].contiguous().view(x.shape[0], parts, width, x.shape[2])  # sums must not depend on strides


def _live(ctx: Context) -> Tensor:
    """Scaled queries, zero where they do not count: padding may hold anything."""

    def make() -> Tensor:
        q = ctx.q * ctx.scale
        return q if ctx.key_mask is None else q.masked_fill_(~ctx.active[..., None], 0.0)

    found: Tensor = ctx.remember("live queries", make)
    return found


def _mean(x: Tensor, mask: Tensor) -> Tensor:
    """Of the rows with mask (.., rows); the others are zero in x already."""
    return x.sum(-2) / mask.sum(-1, keepdim=True).clamp(min=1)


def _root(among: Tensor) -> Tensor:
    """L with L L' = among, so that |x L| is the size of x as the queries see it."""
    width = among.shape[-1]
    floor = SLACK * torch.diagonal(among, dim1=-2, dim2=-1).mean(-1) + 1e-12
    eye = torch.eye(width, dtype=among.dtype, device=among.device)
    root, failed = torch.linalg.cholesky_ex(among + floor[:, None, None] * eye)
    return torch.where((failed == 0)[:, None, None], root, eye)


def _labels(ctx: Context, x: Tensor, seen: Tensor, clusters: int, iterations: int, chunk: int) -> Tensor:
    """(G * C, width), -1 where not visible."""
    if ctx.engine is not None:
        width = x.shape[1]
        label = ctx.engine.cluster(ctx, clusters, iterations, chunk, x.view(ctx.groups, -1, x.shape[2])[:, : ctx.m])
        label = torch.where(label < 0, -1, label - torch.arange(ctx.m, device=label.device) // width * clusters)
        return torch.nn.functional.pad(label, (0, x.shape[0] // ctx.groups * width - ctx.m), value=-1).view(-1, width)
    method = two_level_kmeans if chunk == 0 and clusters >= TWO_LEVELS_FROM else kmeans
    return method(x, seen, clusters, iterations)


def _offsets(logit: Tensor, x: Tensor, label: Tensor, seen: Tensor, clusters: int) -> tuple[Tensor, Tensor, Tensor]:
    """offset (B, width), and of each cluster (B, clusters) s2 and the size. logit (B, width) is the mean query's."""
    at = torch.where(label < 0, clusters, label)
    top = logit.new_full((logit.shape[0], clusters + 1), -torch.inf).scatter_reduce(1, at, logit, "amax")
    weight = torch.exp(logit - top.gather(1, at)).masked_fill(~seen, 0.0)

    def total(y: Tensor) -> Tensor:
        return y.new_zeros(y.shape[0], clusters + 1, y.shape[2]).scatter_add(1, at[..., None].expand_as(y), y)

    both = total(torch.cat([weight[..., None], (weight * logit)[..., None], seen[..., None].to(x.dtype), weight[..., None] * x], -1))
    mass = both[..., :1].clamp(min=1e-30)
    centre, logit_mean = both[..., 3:] / mass, (both[..., 1:2] / mass)[..., 0]
    far = (x - centre.gather(1, at[..., None].expand_as(x))).square().sum(-1)
    spread = (total((weight * far)[..., None]) / mass)[..., 0]
    size = both[..., 2]
    offset = logit - logit_mean.gather(1, at) + _gain(spread, size).gather(1, at)
    return offset.masked_fill(~seen, 0.0), spread[:, :clusters], size[:, :clusters]


def _gain(spread: Tensor, size: Tensor) -> Tensor:
    """log of the mean of exp over `size` normal numbers of this variance: s2 / 2, but no more than if one key held it all."""
    return (spread / 2).minimum(size.clamp(min=1).log())


def _reach(ctx: Context, mean: Tensor, among: Tensor, chunk: int) -> Tensor:
    """log |q - qm| over its root mean square; causal rows take the chunk before theirs, the first none."""
    power = torch.diagonal(among, dim1=-2, dim2=-1).sum(-1)
    width = chunk or max(1, ctx.n)
    parts = -(-ctx.n // width)
    before = (torch.arange(parts, device=mean.device) - (1 if chunk else 0)).clamp(min=0, max=mean.shape[1] - 1)
    far = (_cut(_live(ctx), parts, width) - mean[:, before, None]).square_().sum(-1)
    power = power[:, before, None]
    # nothing to compare with where all queries are one
    reach = torch.where(power > 0, (far / power.clamp(min=1e-30)).clamp_(min=1e-12).log_() / 2, 0.0)
    return reach.view(ctx.groups, -1)[:, : ctx.n].contiguous()
