"""Lloyd's k-means, batched, masked, deterministic: evenly spaced starts, no generator."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .context import Context, at_rank, gather_rows, spread

ROWS_AT_ONCE = 2**22  # score entries held at a time
TWO_LEVELS_FROM = 32  # clusters
SAMPLES_A_CENTRE = 64  # keys that the coarse level is fitted to, for each of its centres


def nearest(x: Tensor, centres: Tensor, kin: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Index (G, M) of the nearest centre for each row of x (G, M, D); with `kin`, families of rows and of centres, inside the family."""
    bias = centres.square().sum(-1)[:, None, :] / 2
    step = max(1, ROWS_AT_ONCE // max(1, centres.shape[0] * centres.shape[1]))
    parts = []
    for n, part in enumerate(x.split(step, dim=1)):
        score = torch.baddbmm(bias, part, centres.mT, beta=-1)
        if kin is not None:
            stranger = kin[0][:, n * step : n * step + part.shape[1], None] != kin[1][:, None]
            score = score.masked_fill_(stranger, float("-inf"))
        parts.append(score.argmax(-1))
    return torch.cat(parts, 1) if len(parts) != 1 else parts[0]


def segment_mean(x: Tensor, label: Tensor, segments: int) -> tuple[Tensor, Tensor]:
    """Means (G, segments, D) and counts (G, segments) of the rows with each label (G, M); -1 is none."""
    g = x.shape[0]
    flat = torch.where(label < 0, segments, label) + torch.arange(g, device=x.device)[:, None] * (segments + 1)
    total = x.new_zeros(g * (segments + 1), x.shape[2]).index_add(0, flat.reshape(-1), x.reshape(-1, x.shape[2]))
    ones = x.new_ones(flat.numel())
    count = x.new_zeros(g * (segments + 1)).index_add(0, flat.reshape(-1), ones).view(g, segments + 1)[:, :segments]
    mean = total.view(g, segments + 1, -1)[:, :segments] / count.clamp(min=1)[..., None]
    return mean, count


def spread_centres(x: Tensor, mask: Tensor, count: Tensor, centres: int) -> Tensor:
    """Evenly spaced visible rows of x."""
    return gather_rows(x, at_rank(mask, spread(count, centres)))


def lloyd(x: Tensor, mask: Tensor, centres: Tensor, iterations: int, near: Callable[[Tensor, Tensor], Tensor] = nearest) -> Tensor:
    for _ in range(iterations):
        mean, size = segment_mean(x, torch.where(mask, near(x, centres), -1), centres.shape[1])
        centres = torch.where(size[..., None] > 0, mean, centres)
    return centres


def kmeans(x: Tensor, mask: Tensor, clusters: int, iterations: int) -> Tensor:
    """Cluster labels (G, M) of the rows of x (G, M, D) with mask (G, M); -1 where masked."""
    centres = lloyd(x, mask, spread_centres(x, mask, mask.sum(-1).clamp(min=1), clusters), iterations)
    return torch.where(mask, nearest(x, centres), -1)


def two_level_kmeans(x: Tensor, mask: Tensor, clusters: int, iterations: int) -> Tensor:
    """The same, for many clusters at the cost of few: sqrt(clusters) coarse ones, fitted to a sample, each split by itself
    into a number of fine ones in proportion to its size. (On MiniLM's keys the error grows by 0.005 over plain Lloyd.)"""
    count, coarse = mask.sum(-1).clamp(min=1), math.isqrt(clusters)
    sample = spread_centres(x, mask, count, min(x.shape[1], SAMPLES_A_CENTRE * coarse))
    everywhere = torch.ones_like(sample[..., 0], dtype=torch.bool)
    centres = spread_centres(sample, everywhere, everywhere.sum(-1), coarse)
    first = torch.where(mask, nearest(x, lloyd(sample, everywhere, centres, iterations)), coarse)
    size = first.new_zeros(x.shape[0], coarse + 1).scatter_add_(1, first, torch.ones_like(first))[:, :coarse]
    share = fine_shares(size, clusters)
    base, start = share.cumsum(-1) - share, size.cumsum(-1) - size
    fine = torch.arange(clusters, device=x.device).expand(x.shape[0], -1).contiguous()
    owner = torch.searchsorted((base + share).contiguous(), fine, right=True).clamp(max=coarse - 1)
    rank = (2 * (fine - base.gather(1, owner)) + 1) * size.gather(1, owner) // (2 * share.gather(1, owner).clamp(min=1))
    place = (start.gather(1, owner) + rank).clamp(max=x.shape[1] - 1)
    centres = gather_rows(x, first.argsort(dim=-1, stable=True).gather(1, place))

    def near(rows: Tensor, fine_centres: Tensor) -> Tensor:
        return nearest(rows, fine_centres, (first, owner))

    return torch.where(mask, near(x, lloyd(x, mask, centres, iterations, near)), -1)


def fine_shares(size: Tensor, clusters: int) -> Tensor:
    """(G, coarse) how many of `clusters` each coarse one gets: one if it has members, the rest in proportion, rounded in running sums."""
    filled = (size > 0).to(torch.int64)
    spare = clusters - filled.sum(-1, keepdim=True)
    total = size.sum(-1, keepdim=True).clamp(min=1)
    until = (2 * size.cumsum(-1) * spare + total) // (2 * total)
    return filled + torch.diff(until, prepend=torch.zeros_like(total))


def key_clusters(ctx: Context, clusters: int, iterations: int) -> Tensor:
    """Clusters of the visible keys; remembered, so that routing and means share them."""

    def make() -> Tensor:
        if ctx.engine is not None:
            return ctx.engine.cluster(ctx, clusters, iterations)
        method = kmeans if clusters < TWO_LEVELS_FROM else two_level_kmeans
        return method(ctx.k, ctx.visible, clusters, iterations)

    with torch.no_grad():
        return ctx.remember(("keys", clusters, iterations), make)


def chunk_clusters(ctx: Context, chunk: int, per_chunk: int, iterations: int) -> tuple[Tensor, int]:
    """Causal: clusters formed inside each chunk of keys. Labels (G, M) = chunk * per_chunk + cluster, and their number."""

    def make() -> Tensor:
        if ctx.engine is not None:
            return ctx.engine.cluster(ctx, per_chunk, iterations, chunk)
        g, m, d = ctx.k.shape
        chunks = -(-m // chunk)
        pad = chunks * chunk - m
        x = torch.nn.functional.pad(ctx.k, (0, 0, 0, pad)).view(g * chunks, chunk, d)
        mask = torch.nn.functional.pad(ctx.visible, (0, pad)).view(g * chunks, chunk)
        label = kmeans(x, mask, per_chunk, iterations).view(g, chunks, chunk)
        offset = torch.arange(chunks, device=x.device)[:, None] * per_chunk
        return torch.where(label < 0, -1, label + offset).reshape(g, chunks * chunk)[:, :m]

    with torch.no_grad():
        label = ctx.remember(("chunks", chunk, per_chunk, iterations), make)
    return label, -(-ctx.m // chunk) * per_chunk
