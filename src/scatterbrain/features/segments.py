"""Means over equal stretches of the visible tokens: landmarks and pooled keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ..clustering import segment_mean
from ..context import at_rank, gather_rows


def segment_of(mask: Tensor, segments: int) -> Tensor:
    """Segment (G, M) of each visible token, by its rank among them; -1 where masked."""
    count = mask.sum(-1, keepdim=True).clamp(min=1)
    rank = mask.to(torch.int64).cumsum(-1) - 1
    return torch.where(mask, rank * segments // count, -1)


def landmarks(x: Tensor, mask: Tensor, segments: int) -> Tensor:
    """(G, segments, D) segment means; with fewer tokens than segments the empty ones repeat a token."""
    mean, size = segment_mean(x, segment_of(mask, segments), segments)
    count = mask.sum(-1, keepdim=True).clamp(min=1)
    rank = torch.arange(segments, device=x.device) * count // segments
    return torch.where(size[..., None] > 0, mean, gather_rows(x, at_rank(mask, rank)))


def log_abs(x: Tensor) -> Tensor:
    """log|x| with a finite gradient at 0, where it gives -inf."""
    zero = x == 0
    return torch.log(torch.where(zero, 1.0, x).abs()).masked_fill(zero, float("-inf"))
