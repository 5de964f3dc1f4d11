"""Pairs met one by one: exact weights on the support, and low-rank weights where they must be added or taken out.

Forward and backward read alike: both rebuild the weights of a batch of tiles from q and k, and keep nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...partial import Partial, finite
from ...random import keep_key, keep_pair
from .tiles import Holder, Size, Tiles


@dataclass
class Dropout:
    p: float
    seed: Tensor
    first_group: int

    def pair(self, tiles: Tiles) -> Tensor:
        g = tiles.group[..., None] + self.first_group
        return keep_pair(self.seed, self.p, g, tiles.q[..., None], tiles.k[:, None])

    def key(self, tiles: Tiles) -> Tensor:
        """(T, 1, bk)"""
        return keep_key(self.seed, self.p, tiles.group[..., None] + self.first_group, tiles.k[:, None])

    def keys(self, size: Size) -> Tensor:
        """(G, M)"""
        return keep_key(self.seed, self.p, size.arange(size.groups)[:, None] + self.first_group, size.arange(size.m)[None])


@dataclass
class Table:
    """Things queries are compared with: keys, or cluster means with a log-count bias and a variance. Rows are flat.

    logit = q.key (+ log(1 + q^2.var / 2)) (+ bias)
    """

    key: Tensor
    value: Tensor
    per_group: int
    bias: Tensor | None = None
    var: Tensor | None = None
    d_key: Tensor | None = None
    d_value: Tensor | None = None
    d_var: Tensor | None = None

    def start_grad(self) -> None:
        self.d_key, self.d_value = torch.zeros_like(self.key), torch.zeros_like(self.value)
        self.d_var = None if self.var is None else torch.zeros_like(self.var)

    def rows(self, tiles: Tiles) -> Tensor:
        return (tiles.group * self.per_group + tiles.k.clamp(min=0)).flatten()

    def logits(self, q: Tensor, rows: Tensor) -> Tensor:
        shape = (q.shape[0], -1)
        a = q @ _take(self.key, rows, shape).mT
        if self.var is not None:
            a += torch.log1p((q * q) @ _take(self.var, rows, shape).mT / 2)
        if self.bias is not None:
            a += self.bias.index_select(0, rows).view(shape)[:, None]
        return a

    def add_logit_grad(self, d: Tensor, q: Tensor, rows: Tensor) -> Tensor:
        """Given d = gradient of the logits, add to the keys' and variances' gradients; return the queries'."""
        assert self.d_key is not None
        shape = (q.shape[0], -1)
        d_q = d @ _take(self.key, rows, shape)
        self.d_key.index_add_(0, rows, (d.mT @ q).flatten(0, 1))
        if self.var is not None and self.d_var is not None:
            var = _take(self.var, rows, shape)
            half = d / (2 + (q * q) @ var.mT)
            d_q += 2 * q * (half @ var)
            self.d_var.index_add_(0, rows, (half.mT @ (q * q)).flatten(0, 1))
        return d_q


@dataclass
class FeatureRows:
    """l_ij = phi_i . psi_j * exp(rho_i), flat rows, every entry within [-1, 1]."""

    phi: Tensor
    psi: Tensor
    rho: Tensor
    d_phi: Tensor | None = None  # gradients with respect to the log-features
    d_psi: Tensor | None = None


@dataclass
class MeanFaces:
    """The mean that stands for key j, seen from query i: its cluster's, its inner block's, or itself."""

    outer: Table
    inner: Table | None
    own: Table
    chunk: int
    block: int

    def of(self, tiles: Tiles) -> list[tuple[Table, Tensor | None]]:
        if self.inner is None:
            return [(self.outer, None)]
        i, j = tiles.q.clamp(min=0)[..., None].to(torch.int32), tiles.k.clamp(min=0)[:, None].to(torch.int32)
        same_chunk = i // self.chunk == j // self.chunk
        if not bool(same_chunk.any()):
            return [(self.outer, None)]
        same_block = i // self.block == j // self.block
        return [(self.outer, ~same_chunk), (self.inner, same_chunk & ~same_block), (self.own, same_block)]


@dataclass
class Rows:
    """Queries and what becomes of them. Flat rows; one spare row takes what tiles pad."""

    q: Tensor
    size: Size
    causal: bool
    key_ok: Tensor | None
    sums: Partial
    dropout: Dropout | None
    # backward
    d_q: Tensor | None = None
    d_out: Tensor | None = None
    delta: Tensor | None = None
    inverse: Tensor | None = None

    def index(self, tiles: Tiles) -> Tensor:
        spare = self.size.groups * self.size.n
        return torch.where(tiles.q < 0, spare, tiles.group * self.size.n + tiles.q).flatten()

    def visible(self, tiles: Tiles) -> Tensor:
        """(T, 1 | bq, bk): real keys, not masked, not in the future."""
        ok = tiles.k >= 0
        if self.key_ok is not None:
            flat = (tiles.group * self.size.m + tiles.k.clamp(min=0)).flatten()
            ok = ok & self.key_ok.index_select(0, flat).view_as(ok)
        ok = ok[:, None]
        return ok & (tiles.k[:, None] <= tiles.q[..., None]) if self.causal else ok


def owned(tiles: Tiles, visible: Tensor, earlier: list[Holder]) -> Tensor:
    """Pairs of this layer that no earlier layer holds."""
    own = visible if tiles.own is None else visible & tiles.own
    for holder in earlier:
        own = own & ~holder(tiles)
    return own


class PairWork:
    """One batch of tiles against one table; `low` says which low-rank weights come along, `sign` how.

    sign -1: taken out on the owned pairs (they are in a low-rank total); +1: added on the visible pairs not owned.
    """

    def __init__(self, rows: Rows, table: Table, low: FeatureRows | MeanFaces | None = None, sign: int = 0):
        self.rows, self.table = rows, table
        self.low, self.sign = (low, sign) if sign else (None, 0)

    def _load(self, tiles: Tiles, visible: Tensor, own: Tensor) -> None:
        self.qi, self.kj = self.rows.index(tiles), self.table.rows(tiles)
        self.repeats = tiles.repeats
        tall, wide = tiles.q.shape, (tiles.k.shape[0], -1)
        self.q = _take(self.rows.q, self.qi, (tall[0], -1))
        self.value = _take(self.table.value, self.kj, wide)
        self.own = own.expand(-1, tall[1], -1)
        self.logits = self.table.logits(self.q, self.kj).masked_fill_(~self.own, -torch.inf)
        self.low_mask = self.own if self.sign < 0 else (visible & ~own).expand(-1, tall[1], -1)
        drop = self.rows.dropout
        self.keep = None if drop is None or self.table.bias is not None else drop.pair(tiles)
        self.keep_low = None if drop is None else drop.key(tiles)

    def forward(self, tiles: Tiles, visible: Tensor, own: Tensor) -> None:
        self._load(tiles, visible, own)
        top = self.logits.amax(-1)
        faces: list[tuple[Tensor, Tensor]] = []
        if isinstance(self.low, FeatureRows):
            rho = self.low.rho.index_select(0, self.qi).view_as(top)
            top = torch.where(self.low_mask.any(-1), torch.maximum(top, rho), top)
        elif isinstance(self.low, MeanFaces):
            for table, where in self.low.of(tiles):
                logits = table.logits(self.q, self.kj)
                mask = self.low_mask if where is None else self.low_mask & where
                logits.masked_fill_(~mask, -torch.inf)
                faces.append((logits, mask))
                top = torch.maximum(top, logits.amax(-1))
        base = finite(top)[..., None]
        w = self.logits.sub_(base).exp_()
        low = None
        if isinstance(self.low, FeatureRows):
            scale = torch.exp((rho[..., None] - base).clamp(max=0.0))
            low = self._phi_psi(self.low, scale).masked_fill_(~self.low_mask, 0.0)
        for logits, _ in faces:
            part = logits.sub_(base).exp_()
            low = part if low is None else low.add_(part)
        self._add(w, low, top)

    def _phi_psi(self, low: FeatureRows, scale: Tensor) -> Tensor:
        tiles = self.q.shape[0]
        phi = _take(low.phi, self.qi, (tiles, -1)) * scale
        return phi @ _take(low.psi, self.kj, (tiles, -1)).mT

    def _add(self, w: Tensor, low: Tensor | None, top: Tensor) -> None:
        if self.keep is None:
            if low is not None:
                w = w.add_(low, alpha=self.sign)
            denominator, numerator = w.sum(-1), w @ self.value
        else:
            denominator, dropped = w.sum(-1), w * self.keep
            if low is not None and self.keep_low is not None:
                denominator = denominator + self.sign * low.sum(-1)
                dropped = dropped + self.sign * low * self.keep_low
            numerator = dropped @ self.value
        add = add_repeated_rows if self.repeats else add_rows
        add(self.rows.sums, self.qi, Partial(numerator.flatten(0, 1), denominator.flatten(), top.flatten()))

    def backward(self, tiles: Tiles, visible: Tensor, own: Tensor) -> None:
        self._load(tiles, visible, own)
        rows = self.rows
        assert rows.d_out is not None and rows.delta is not None and rows.inverse is not None
        assert rows.d_q is not None and self.table.d_value is not None
        shape = tiles.q.shape
        base = finite(rows.sums.log_scale.index_select(0, self.qi)).view(*shape, 1)
        inverse = rows.inverse.index_select(0, self.qi).view(*shape, 1)
        delta = rows.delta.index_select(0, self.qi).view(*shape, 1)
        g = _take(rows.d_out, self.qi, (shape[0], -1))
        gain = g @ self.value.mT  # d_out_i . v_j
        p = self.logits.sub_(base).exp_().mul_(inverse)
        kept = p if self.keep is None else p * self.keep
        d_value = kept.mT @ g
        d_logit = p * ((gain if self.keep is None else gain * self.keep) - delta)
        d_q = self.table.add_logit_grad(d_logit, self.q, self.kj)
        if self.low is not None:
            slope = (gain if self.keep_low is None else gain * self.keep_low).sub_(delta)
            if isinstance(self.low, FeatureRows):
                low = self._feature_grad(self.low, slope, base, inverse)
            else:
                low, d_low = self._mean_grad(self.low, tiles, slope, base, inverse)
                d_q = d_q + d_low
            d_value += self.sign * ((low if self.keep_low is None else low * self.keep_low).mT @ g)
        rows.d_q.index_add_(0, self.qi, d_q.flatten(0, 1))
        self.table.d_value.index_add_(0, self.kj, d_value.flatten(0, 1))

    def _feature_grad(self, low: FeatureRows, slope: Tensor, base: Tensor, inverse: Tensor) -> Tensor:
        assert low.d_phi is not None and low.d_psi is not None
        tiles = slope.shape[0]
        rho = low.rho.index_select(0, self.qi).view_as(base)
        phi = _take(low.phi, self.qi, (tiles, -1)) * (torch.exp((rho - base).clamp(max=0.0)) * inverse)
        psi = _take(low.psi, self.kj, (tiles, -1))
        slope = slope.masked_fill_(~self.low_mask, 0.0).mul_(self.sign)
        low.d_phi.index_add_(0, self.qi, ((slope @ psi) * phi).flatten(0, 1))
        low.d_psi.index_add_(0, self.kj, ((slope.mT @ phi) * psi).flatten(0, 1))
        return (phi @ psi.mT).masked_fill_(~self.low_mask, 0.0)

    def _mean_grad(self, low: MeanFaces, tiles: Tiles, slope: Tensor, base: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        total, d_q = torch.zeros_like(slope), torch.zeros_like(self.q)
        for table, where in low.of(tiles):
            mask = self.low_mask if where is None else self.low_mask & where
            logits = table.logits(self.q, self.kj).masked_fill_(~mask, -torch.inf)
            part = logits.sub_(base).exp_().mul_(inverse)
            d_q += table.add_logit_grad(self.sign * part * slope, self.q, self.kj)
            total += part
        return total, d_q


def add_rows(sums: Partial, index: Tensor, part: Partial) -> None:
    """Merge a partial into the rows `index`, each of which stands there once (but for the spare row)."""
    old = sums.log_scale.index_select(0, index)
    scale = torch.maximum(old, part.log_scale)
    base = finite(scale)
    keep, add = torch.exp(old - base), torch.exp(part.log_scale - base)
    denominator = sums.denominator.index_select(0, index) * keep + part.denominator * add
    numerator = sums.numerator.index_select(0, index).mul_(keep[:, None]).addcmul_(part.numerator, add[:, None])
    sums.log_scale.index_copy_(0, index, scale)
    sums.denominator.index_copy_(0, index, denominator)
    sums.numerator.index_copy_(0, index, numerator)


def add_repeated_rows(sums: Partial, index: Tensor, part: Partial) -> None:
    """The same where a row may stand several times: raise the rows' scales first, then add."""
    old = sums.log_scale.clone()
    sums.log_scale.scatter_reduce_(0, index, part.log_scale, "amax")
    base = finite(sums.log_scale)
    raised = (sums.log_scale > old).nonzero()[:, 0]
    shrink = torch.exp(old - base).index_select(0, raised)
    sums.denominator.index_copy_(0, raised, sums.denominator.index_select(0, raised) * shrink)
    sums.numerator.index_copy_(0, raised, sums.numerator.index_select(0, raised).mul_(shrink[:, None]))
    add = torch.exp(part.log_scale - base.index_select(0, index))
    sums.denominator.index_add_(0, index, part.denominator * add)
    sums.numerator.index_add_(0, index, part.numerator.mul_(add[:, None]))


def _take(x: Tensor, rows: Tensor, shape: tuple[int, int]) -> Tensor:
    """x (L, D) at flat rows -> (T, b, D)."""
    return x.index_select(0, rows).view(shape[0], rows.numel() // max(1, shape[0]), x.shape[-1])
