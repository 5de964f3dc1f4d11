"""A partial row of attention: what every branch returns, and the associative way to add two."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Partial:
    """sum_j w_ij v_j = numerator * exp(log_scale); sum_j w_ij = denominator * exp(log_scale).

    numerator (.., E), denominator (..), log_scale (..), -inf where nothing was met.
    """

    numerator: Tensor
    denominator: Tensor
    log_scale: Tensor

    def output(self) -> Tensor:
        """numerator / denominator, zero where the row met nothing."""
        empty = self.denominator == 0
        return self.numerator * torch.where(empty, 0.0, 1 / torch.where(empty, 1.0, self.denominator))[..., None]


def finite(log_scale: Tensor) -> Tensor:
    """-inf read as 0, so that exp(-inf - finite(-inf)) is 0 and not NaN."""
    return torch.where(torch.isneginf(log_scale), 0.0, log_scale)


def merge(a: Partial, b: Partial) -> Partial:
    scale = torch.maximum(a.log_scale, b.log_scale)
    base = finite(scale)
    fa, fb = torch.exp(a.log_scale - base), torch.exp(b.log_scale - base)
    numerator = a.numerator * fa[..., None] + b.numerator * fb[..., None]
    return Partial(numerator, a.denominator * fa + b.denominator * fb, scale)
