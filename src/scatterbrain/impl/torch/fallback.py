"""Rows done densely, pair by pair and feature by feature in logarithms.

Needed where the running sums lose the row: its largest low-rank weight lies in the future or on the support and
dwarfs the rest, so that scaling by it underflows, or taking it out cancels. Slow, exact, and rare.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...lowrank import Features
from ...partial import finite
from .tiles import Holder, Tiles

if TYPE_CHECKING:
    from .engine import Heads

TERMS_AT_ONCE = 2**23


@dataclass
class Dense:
    """Some rows of one group against all its keys."""

    group: int
    rows: Tensor  # (c,) flat
    own: Tensor  # (c, M)
    logits: Tensor  # (c, M), -inf off the support
    terms: Tensor  # (c, M, R) exp(log_phi + log_psi - top), signed
    top: Tensor  # (c, M), -inf on the support and where nothing is visible
    keep: Tensor | None  # (c, M) dropout factor of each pair


def _chunks(heads: Heads, rows: Tensor) -> Iterator[Dense]:
    call, size = heads.call, heads.size
    low = call.low_rank
    assert isinstance(low, Features)
    step = max(1, TERMS_AT_ONCE // max(1, size.m * low.log_phi.shape[-1]))
    holders = [Holder(layer, size) for layer in call.layers]
    keys = size.arange(size.m)[None]
    for g in range(size.groups):
        mine = rows[rows // max(1, size.n) == g]
        for part in mine.split(step) if mine.numel() else ():
            tiles = Tiles(torch.full_like(part[:1], g)[:, None], (part % size.n)[None], keys)
            visible = heads.rows.visible(tiles).expand(1, part.numel(), -1)
            own = torch.zeros_like(visible)
            for holder in holders:
                own = own | holder(tiles)
            own = own & visible
            off = (visible & ~own)[0]
            terms = low.log_phi[g, tiles.q[0]][:, None, :] + low.log_psi[g][None]
            top = terms.amax(-1).masked_fill(~off, -torch.inf)
            terms = torch.exp(terms - finite(top)[..., None]).masked_fill_(~off[..., None], 0.0)
            terms = terms if low.sign_phi is None else terms * low.sign_phi[g, tiles.q[0]][:, None, :]
            terms = terms if low.sign_psi is None else terms * low.sign_psi[g][None]
            logits = (heads.rows.q[part] @ call.k[g].mT).masked_fill(~own[0], -torch.inf)
            keep = None
            if heads.drop is not None:
                keep = torch.where(own, heads.drop.pair(tiles), heads.drop.key(tiles))[0].to(logits.dtype)
            yield Dense(g, part, own[0], logits, terms, top, keep)


def forward(heads: Heads, rows: Tensor) -> None:
    sums = heads.rows.sums
    for d in _chunks(heads, rows):
        scale = torch.maximum(d.logits.amax(-1), d.top.amax(-1))
        base = finite(scale)[:, None]
        w = torch.exp(d.logits - base) + d.terms.sum(-1) * torch.exp(d.top - base)
        sums.log_scale[d.rows], sums.denominator[d.rows] = scale, w.sum(-1)
        sums.numerator[d.rows] = (w if d.keep is None else w * d.keep) @ heads.call.v[d.group]


def backward(heads: Heads, rows: Tensor) -> None:
    """Add these rows' gradients, then take them out of the common path."""
    r, keys, low = heads.rows, heads.keys, heads.features
    assert r.d_q is not None and r.d_out is not None and r.delta is not None and r.inverse is not None
    assert keys.d_key is not None and keys.d_value is not None and low is not None
    assert low.d_phi is not None and low.d_psi is not None
    m = heads.size.m
    for d in _chunks(heads, rows):
        at = slice(d.group * m, (d.group + 1) * m)
        base = finite(r.sums.log_scale[d.rows])[:, None]
        exact = torch.exp(d.logits - base) * r.inverse[d.rows][:, None]
        terms = d.terms * (torch.exp(d.top - base) * r.inverse[d.rows][:, None])[..., None]
        g = r.d_out[d.rows]
        gain = g @ heads.call.v[d.group].mT
        slope = (gain if d.keep is None else gain * d.keep) - r.delta[d.rows][:, None]
        d_exact = exact * slope
        w = exact + terms.sum(-1)
        keys.d_value[at] += (w if d.keep is None else w * d.keep).mT @ g
        r.d_q[d.rows] += d_exact @ heads.call.k[d.group]
        keys.d_key[at] += d_exact.mT @ r.q[d.rows]
        d_terms = terms.mul_(slope[..., None])
        low.d_phi[d.rows] += d_terms.sum(1)
        low.d_psi[at] += d_terms.sum(0)
    r.d_out[rows], r.delta[rows], r.inverse[rows] = 0.0, 0.0, 0.0
