"""What supports and maps are shown: queries, keys, and who is visible."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .impl.native import Engine


class Context:
    """q (G, N, D) and k (G, M, D) unscaled, in the compute dtype, G being batch x `heads`; key_mask (G, M), True where visible, or None.

    q and k may come as functions that make them, with their lengths: not every method looks at them. Where an
    `engine` is given it does the heavy parts of a selection; `lazy` says that it will also make the routes.
    """

    def __init__(
        self,
        q: Tensor | Callable[[], Tensor],
        k: Tensor | Callable[[], Tensor],
        scale: float,
        causal: bool,
        key_mask: Tensor | None,
        memo: dict[Any, Any] | None = None,
        *,
        sizes: tuple[int, int, int, torch.device] | None = None,
        engine: Engine | None = None,
        lazy: bool = False,
        heads: int | None = None,
    ) -> None:
        self._q, self._k = q, k
        if sizes is None:
            assert isinstance(q, Tensor) and isinstance(k, Tensor)
            sizes = q.shape[0], q.shape[1], k.shape[1], q.device
        self.groups, self.n, self.m, self.device = sizes
        self.scale, self.causal, self.key_mask = scale, causal, key_mask
        self.memo: dict[Any, Any] = {} if memo is None else memo
        self.engine, self.lazy = engine, lazy
        self.heads = self.groups if heads is None else heads

    @property
    def q(self) -> Tensor:
        if not isinstance(self._q, Tensor):
            self._q = self._q()
        return self._q

    @property
    def k(self) -> Tensor:
        if not isinstance(self._k, Tensor):
            self._k = self._k()
        return self._k

    @property
    def visible(self) -> Tensor:
        """(G, M) bool, always a tensor."""
        if self.key_mask is not None:
            return self.key_mask
        return torch.ones(self.groups, self.m, dtype=torch.bool, device=self.device)

    @property
    def active(self) -> Tensor:
        """(G, N) bool: queries that count in statistics. In self-attention a masked key's query does not."""
        if self.key_mask is not None and self.n == self.m:
            return self.key_mask
        return torch.ones(self.groups, self.n, dtype=torch.bool, device=self.device)

    @property
    def key_count(self) -> Tensor:
        """(G,) number of visible keys, at least 1."""
        return self.visible.sum(-1).clamp(min=1)

    @property
    def query_count(self) -> Tensor:
        return self.active.sum(-1).clamp(min=1)

    @property
    def key_extent(self) -> Tensor:
        """(G,) one past the last visible key, at least 1."""
        position = torch.arange(1, self.m + 1, device=self.device)
        return (self.visible * position).amax(-1).clamp(min=1)

    def key_at(self, rank: Tensor) -> Tensor:
        """(G, r) positions of the visible keys with these ranks (G, r)."""
        return at_rank(self.visible, rank)

    def query_at(self, rank: Tensor) -> Tensor:
        return at_rank(self.active, rank)

    def remember(self, key: Any, make: Callable[[], Any]) -> Any:
        """Share work between a support and a map of one call, such as the same clusters."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]


def at_rank(mask: Tensor, rank: Tensor) -> Tensor:
    """(G, r) position of the rank-th True of each row of mask (G, M); the last one's beyond their number, 0 where there is none.

    Not by searchsorted, which Inductor refuses on the cumulative sum of a constant (torch 2.11).
    """
    m, upto = mask.shape[1], mask.to(torch.int64).cumsum(-1)
    place = torch.where(mask, upto - 1, m)
    position = torch.arange(m, device=mask.device).expand_as(place)
    table = torch.zeros(mask.shape[0], m + 1, dtype=torch.int64, device=mask.device).scatter_(1, place, position)
    return table.gather(1, torch.minimum(rank, (upto[:, -1:] - 1).clamp(min=0)))


def spread(count: Tensor, samples: int) -> Tensor:
    """(G, samples) ranks spread evenly over 0..count-1."""
    step = torch.arange(samples, device=count.device)
    return ((2 * step + 1) * count[:, None]) // (2 * samples)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """x (G, N, D) at index (G, r) -> (G, r, D)."""
    return torch.gather(x, 1, index[..., None].expand(-1, -1, x.shape[-1]))
