"""Explicit randomness: seeded draws that torch.compile can trace, and the counter-based dropout mask."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("scatterbrain::gaussian", mutates_args=())
def gaussian(shape: list[int], seed: int, stream: int) -> Tensor:
    """Normal numbers from a seed; an operator, so that a compiled graph can hold it."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + stream) % 2**63)
    return torch.randn(shape, generator=generator)


@gaussian.register_fake
def _(shape: list[int], seed: int, stream: int) -> Tensor:
    return torch.empty(shape)


def uniform(seed: Tensor | int, *counters: Tensor) -> Tensor:
    """Numbers in [0, 1) that depend on seed and counters alone (64-bit mixing), any broadcastable shape."""
    h = torch.as_tensor(seed, dtype=torch.int64, device=counters[0].device) * -7046029254386353131
    for c in counters:
        h = (h + c) * -4658895280553007687
        h = h ^ ((h >> 29) & 0x7FFFFFFFF)
    h = h * -7723592293110705685
    h = h ^ ((h >> 32) & 0xFFFFFFFF)
    return ((h >> 20) & 0xFFFFFF).to(torch.float32) / 2**24


@torch.library.custom_op("scatterbrain::uniform_grid", mutates_args=())
def uniform_grid(rows: Tensor, columns: Tensor, seed: int) -> Tensor:
    """`uniform` of each row (r, 1) and column (c): (r, c). An operator, since Triton's code would mix in 32 bits."""
    return uniform(seed, rows, columns)


@uniform_grid.register_fake
def _(rows: Tensor, columns: Tensor, seed: int) -> Tensor:
    return rows.new_empty(rows.shape[0], columns.shape[0], dtype=torch.float32)


def keep_pair(seed: Tensor, p: float, group: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Dropout factor of a pair on the support: 0 or 1/(1-p)."""
    return (uniform(seed, group, i + 1, j) >= p).to(torch.float32) / max(1.0 - p, 1e-30)


def keep_key(seed: Tensor, p: float, group: Tensor, j: Tensor) -> Tensor:
    """Dropout factor off the support. One a key: a mask per pair would cost N x M, and the mean is kept."""
    return keep_pair(seed, p, group, torch.full_like(j, -1), j)
