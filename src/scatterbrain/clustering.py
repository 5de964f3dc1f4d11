"""Lloyd's k-means, batched, masked, deterministic: evenly spaced starts, no generator."""

from __future__ import annotations

import torch
from torch import Tensor

from .context import Context, gather_rows, spread

ROWS_AT_ONCE = 2**22  # score entries held at a time


def nearest(x: Tensor, centres: Tensor) -> Tensor:
    """Index (G, M) of the nearest centre for each row of x (G, M, D)."""
    bias = centres.square().sum(-1)[:, None, :] / 2
    step = max(1, ROWS_AT_ONCE // max(1, centres.shape[0] * centres.shape[1]))
    parts = [(torch.baddbmm(bias, part, centres.mT, beta=-1)).argmax(-1) for part in x.split(step, dim=1)]
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


def kmeans(x: Tensor, mask: Tensor, clusters: int, iterations: int) -> Tensor:
    """Cluster labels (G, M) of the rows of x (G, M, D) with mask (G, M); -1 where masked."""
    count = mask.sum(-1).clamp(min=1)
    start = torch.searchsorted(mask.to(torch.int64).cumsum(-1), spread(count, clusters) + 1)
    centres = gather_rows(x, start.clamp(max=x.shape[1] - 1))
    for _ in range(iterations):
        label = torch.where(mask, nearest(x, centres), -1)
        mean, size = segment_mean(x, label, clusters)
        centres = torch.where(size[..., None] > 0, mean, centres)
    return torch.where(mask, nearest(x, centres), -1)


def key_clusters(ctx: Context, clusters: int, iterations: int) -> Tensor:
    """Clusters of the visible keys; remembered, so that routing and means share them."""
    with torch.no_grad():
        return ctx.remember(("keys", clusters, iterations), lambda: kmeans(ctx.k, ctx.visible, clusters, iterations))


def chunk_clusters(ctx: Context, chunk: int, per_chunk: int, iterations: int) -> tuple[Tensor, int]:
    """Causal: clusters formed inside each chunk of keys. Labels (G, M) = chunk * per_chunk + cluster, and their number."""

    def make() -> Tensor:
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
