"""Exact attention of a case, and how far a method is from it: output and matrix, never holding a long case's matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .cases import Case
from .contenders import Contender, Forward, Shape

WHOLE = 2048  # up to here the matrix is held and compared entry by entry
DOUBLE = 4096  # up to here the truth is computed in float64
PROBES = 64
SLICE = 256


@dataclass(frozen=True, kw_only=True)
class Truth:
    """output (B, H, N, E). `matrix` (B, H, N, N) where short enough; else `probed`, its product with the probes.

    norm (B, H) is the squared Frobenius norm of each head's matrix.
    """

    output: Tensor
    norm: Tensor
    probes: Tensor
    probed: Tensor
    matrix: Tensor | None


def exact(case: Case) -> Truth:
    """Softmax attention in blocks of rows, one head after the other."""
    shape, n = case.shape, case.shape.length
    dtype = torch.float64 if n <= DOUBLE else torch.float32
    probes = signs(n, shape.seed)
    out = torch.empty(shape.batch, shape.heads, n, case.v.shape[3], dtype=dtype)
    norm = torch.zeros(shape.batch, shape.heads, dtype=torch.float64)
    probed = torch.empty(shape.batch, shape.heads, n, PROBES, dtype=dtype)
    matrix = torch.empty(shape.batch, shape.heads, n, n) if n <= WHOLE else None
    for b in range(shape.batch):
        for h in range(shape.heads):
            q, k, v = case.head(b, h, dtype)
            values = torch.cat([v, probes.to(dtype)], 1)
            for first in range(0, n, 1024):
                weights = rows(q[first : first + 1024], k, first, shape)
                norm[b, h] += weights.square().sum(dtype=torch.float64)
                product = weights @ values
                out[b, h, first : first + 1024], probed[b, h, first : first + 1024] = product.split([v.shape[1], PROBES], -1)
                if matrix is not None:
                    matrix[b, h, first : first + 1024] = weights
    return Truth(output=out, norm=norm, probes=probes, probed=probed, matrix=matrix)


def rows(q: Tensor, k: Tensor, first: int, shape: Shape) -> Tensor:
    logits = q @ k.mT * shape.scale
    if shape.causal:
        logits.masked_fill_(torch.arange(k.shape[0]) > torch.arange(first, first + q.shape[0])[:, None], -torch.inf)
    return torch.softmax(logits, -1)


def signs(n: int, seed: int) -> Tensor:
    return torch.randint(2, (n, PROBES), generator=torch.Generator().manual_seed(seed)).float() * 2 - 1


def output_error(out: Tensor, truth: Truth) -> float:
    """Relative Frobenius, mean over heads."""
    gap = (out - truth.output).flatten(2).norm(dim=-1) / truth.output.flatten(2).norm(dim=-1)
    return float(gap.mean())


def matrix_error(contender: Contender, forward: Forward, case: Case, truth: Truth) -> tuple[float, float | None]:
    """Relative Frobenius, mean over heads, and its standard error where it is an estimate.

    Attention to the identity is the matrix. Where that is long, attention to random signs x has the same information:
    the expectation of |Ex|^2 is the squared Frobenius norm of E, whatever E is.
    """
    if truth.matrix is not None:
        return whole_error(contender, forward, case, truth.matrix), None
    # Other packages take values as wide as keys, and no others.
    width = case.shape.width if contender.kind == "package" else PROBES
    parts = [
        given(contender, forward, case, part) - true for part, true in zip(truth.probes.split(width, 1), truth.probed.split(width, 3), strict=True)
    ]
    squares = torch.cat([part.double().square().sum(2) for part in parts], -1) / truth.norm[..., None]
    error = squares.mean(-1).sqrt()
    spread = squares.std(-1) / math.sqrt(PROBES) / (2 * error).clamp(min=1e-30)
    return float(error.mean()), float(spread.square().sum().sqrt() / spread.numel())


def whole_error(contender: Contender, forward: Forward, case: Case, matrix: Tensor) -> float:
    n = case.shape.length
    width = case.shape.width if contender.kind == "package" else SLICE
    gap = torch.zeros(matrix.shape[:2], dtype=torch.float64)
    for first in range(0, n, width):
        last = min(first + width, n)
        values = torch.zeros(n, width)
        values[range(first, last), range(last - first)] = 1
        weights = given(contender, forward, case, values)[..., : last - first]
        gap += (weights - matrix[..., first:last]).square().sum((2, 3), dtype=torch.float64)
    return float((gap / matrix.square().sum((2, 3), dtype=torch.float64)).sqrt().mean())


def given(contender: Contender, forward: Forward, case: Case, values: Tensor) -> Tensor:
    """(B, H, N, E) for the same values (N, E) in every head. Every width is padded to one that the method takes."""
    shape, width = case.shape, values.shape[1]
    if contender.kind == "package" and width < shape.width:
        values = torch.nn.functional.pad(values, (0, shape.width - width))
    values = values.to(case.v.dtype).expand(shape.batch, shape.kv_heads, *values.shape)
    with torch.no_grad():
        return forward(*contender.feed(shape, case.q, case.k, values))[..., :width]
