"""The generative model of clustered attention inputs: Process 1 of Chen et al. 2021 ("Scatterbrain", section 3.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import require, require_int


@dataclass(frozen=True, kw_only=True)
class Process1:
    """n tokens around n / cluster_size centres: z = c + r, queries = keys = z, logits beta z.z'.

    c ~ N(0, I / sqrt(d)) and r ~ N(0, delta I / sqrt(d)), read as the paper writes it: the second argument is a
    covariance, so |c|^2 is about sqrt(d). The paper's proof takes |c|^2 = 1; that is the same data at beta sqrt(d).
    """

    n: int = 4096
    d: int = 64
    cluster_size: int = 16
    delta: float = 0.1
    beta_factor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("n", "d", "cluster_size"):
            require_int(getattr(self, name), name)
        require(self.cluster_size <= self.n, "cluster_size", "be at most n", f"{self.cluster_size} with n={self.n}", "pass smaller clusters")
        require(0 <= self.delta < math.inf, "delta", "be at least 0 and finite", self.delta, "pass the share of a cluster's spread, such as 0.1")
        require(0 < self.beta_factor < math.inf, "beta_factor", "be positive and finite", self.beta_factor, "pass 1 for the middle temperature")

    @property
    def clusters(self) -> int:
        return -(-self.n // self.cluster_size)

    @property
    def scale(self) -> float:
        """beta: beta_factor times the middle of the paper's three regimes, log(n) on the unit sphere, log(n) / sqrt(d) here."""
        return self.beta_factor * math.log(self.n) / math.sqrt(self.d)

    def sample(self, generator: torch.Generator, heads: int = 1) -> tuple[Tensor, Tensor]:
        """z (1, heads, n, d) and the cluster of each token (heads, n). Heads are independent draws.

        Tokens come in random order: in the order drawn, a window alone would hold every cluster.
        """
        spread = self.d**-0.25
        centres = torch.randn(heads, self.clusters, self.d, generator=generator) * spread
        noise = torch.randn(heads, self.n, self.d, generator=generator) * spread * math.sqrt(self.delta)
        order = torch.rand(heads, self.n, generator=generator).argsort(-1)
        label = order // self.cluster_size
        z = torch.gather(centres, 1, label[..., None].expand(-1, -1, self.d)) + noise
        return z[None], label
