"""Sparse + low-rank attention over groups of heads: which branches run, forward and backward.

exact pairs     every layer of the selection, tile by tile (pairs.py)
low-rank rest   features by running sums (states.py), cluster means (means.py)
correction      band: what the tiles leave is summed around them;   partition: the other buckets' sums;
                otherwise the low-rank total, less l_ij on the support, pair by pair
fallback        rows where that loses too many digits are done densely (fallback.py)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...lowrank import Features, LowRank, Means
from ...partial import Partial, finite
from ...selection import Band, Buckets, Layer, take_groups
from . import fallback, states
from .means import MeanBranch
from .pairs import Dropout, FeatureRows, MeanFaces, PairWork, Rows, Table, owned
from .tiles import Holder, Size, Tiles, band_block, band_tiles, batches, dense_labels, in_batches

ENTRIES_AT_ONCE = 2**22  # rows x features of the heads done together
CAUSAL_BLOCK = 128
Batch = tuple[Tiles, Tensor, Tensor]  # tiles, visible, own


@dataclass(frozen=True)
class Call:
    """One attention call: q (G, N, D) scaled, k (G, M, D), v (G, M, E), key_mask (G, M) or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    layers: tuple[Layer, ...]
    low_rank: LowRank | None
    key_mask: Tensor | None
    causal: bool
    double_count: bool
    dropout_p: float
    seed: Tensor | None
    first_group: int = 0

    def parts(self) -> Iterator[tuple[int, Call]]:
        """Some groups at a time, so that temporaries stay small at any length."""
        g, n, d = self.q.shape
        features = self.low_rank.log_phi.shape[-1] if isinstance(self.low_rank, Features) else 0
        width = max(features, d, self.v.shape[-1])
        step = max(1, ENTRIES_AT_ONCE // max(1, (n + self.k.shape[1]) * width))
        for a in range(0, g, step):
            b = min(a + step, g)
            mask = None if self.key_mask is None else self.key_mask[a:b]
            low = None if self.low_rank is None else _take_low_rank(self.low_rank, a, b)
            q, k, v, layers = self.q[a:b], self.k[a:b], self.v[a:b], take_groups(self.layers, a, b)
            first = self.first_group + a
            part = replace(self, q=q, k=k, v=v, layers=layers, low_rank=low, key_mask=mask, first_group=first)
            yield a, part


def _take_low_rank(low: LowRank, a: int, b: int) -> LowRank:
    if isinstance(low, Means):
        offsets = (None if t is None else t[a:b] for t in (low.offset, low.offset_in))
        return Means(low.node[a:b], low.nodes, low.order, low.chunk, low.inner, *offsets)
    signs = (None if s is None else s[a:b] for s in (low.sign_phi, low.sign_psi))
    return Features(low.log_phi[a:b], low.log_psi[a:b], *signs)


def strategy(layers: Sequence[Layer], low: LowRank | None, causal: bool, double_count: bool) -> str:
    """How the low-rank part keeps off the support."""
    everything = any(isinstance(x, Band) and x.lo is None and x.hi is None and x.dilation == 1 for x in layers)
    if low is None or (everything and not double_count):
        return "none"
    if isinstance(low, Means):
        return "means"
    if not layers or double_count:
        return "total"
    if len(layers) == 1:
        layer = layers[0]
        if isinstance(layer, Band) and layer.dilation == 1 and layer.lo is not None and layer.hi is not None:
            return "band" if layer.lo <= 0 <= layer.hi else "correction"
        if isinstance(layer, Buckets) and layer.q_label.shape[-1] == 1 and not causal:
            return "partition"
    return "correction"


class Heads:
    """The working state of some heads."""

    def __init__(self, call: Call):
        g, n, d = call.q.shape
        m, e = call.v.shape[1], call.v.shape[2]
        self.call = call
        self.size = Size(g, n, m, call.q.device)
        self.drop = Dropout(call.dropout_p, call.seed, call.first_group) if call.dropout_p > 0 and call.seed is not None else None
        ok = None if call.key_mask is None else call.key_mask.reshape(-1)
        q = torch.cat([call.q.reshape(g * n, d), call.q.new_zeros(1, d)])
        spare = g * n + 1
        sums = Partial(q.new_zeros(spare, e), q.new_zeros(spare), q.new_full((spare,), -torch.inf))
        self.rows = Rows(q, self.size, call.causal, ok, sums, self.drop)
        self.keys = Table(call.k.reshape(g * m, d), call.v.reshape(g * m, e), m)
        self.how = strategy(call.layers, call.low_rank, call.causal, call.double_count)
        low = None if self.how == "none" else call.low_rank
        self.features = self._features(low, ok) if isinstance(low, Features) else None
        self.branch: MeanBranch | None = None
        if isinstance(low, Means):
            first = call.layers[0] if call.layers and not call.double_count else None
            self.branch = MeanBranch(low, self.rows, self.keys, self.drop, first)
        self.plan = self._plan() if self.features is not None else None

    def _features(self, low: Features, ok: Tensor | None) -> FeatureRows:
        """Scale every feature by its largest value over the keys, every row by its largest exponent then."""
        g, _, r = low.log_phi.shape
        psi = low.log_psi if ok is None else low.log_psi.masked_fill(~ok.view(g, -1, 1), -torch.inf)
        top = finite(psi.amax(1, keepdim=True))
        psi = torch.exp(psi - top)
        exponent = low.log_phi + top
        rho = exponent.amax(-1)
        phi = torch.exp(exponent - finite(rho)[..., None])
        phi = phi if low.sign_phi is None else phi * low.sign_phi
        psi = psi if low.sign_psi is None else psi * low.sign_psi
        spare = phi.new_zeros(1, r)
        return FeatureRows(
            torch.cat([phi.reshape(-1, r), spare]),
            psi.reshape(-1, r),
            torch.cat([rho.reshape(-1), rho.new_full((1,), -torch.inf)]),
        )

    def _plan(self) -> states.Plan:
        if self.how == "band":
            band = self.call.layers[0]
            assert isinstance(band, Band) and band.lo is not None and band.hi is not None
            return states.by_position(self.rows, band_block(band, self.size), band.lo, band.hi, self.call.causal)
        if self.how == "partition":
            layer = self.call.layers[0]
            assert isinstance(layer, Buckets)
            q_label, k_label, buckets = dense_labels(layer, self.size)
            return states.by_bucket(self.rows, q_label[:, 0], k_label, buckets)
        if self.call.causal:
            return states.by_position(self.rows, CAUSAL_BLOCK, 0, 0, True)
        return states.total(self.rows)

    def work(self) -> Iterator[tuple[PairWork, Batch]]:
        """Every batch of support pairs, in the order that both passes take."""
        corrected, plain = PairWork(self.rows, self.keys, *self._correction()), PairWork(self.rows, self.keys)
        earlier: list[Holder] = []
        for n, layer in enumerate(self.call.layers):
            pairs = plain if n == 0 and self.branch is not None and self.branch.routed is not None else corrected
            for tiles in batches(layer, self.size):
                visible = self.rows.visible(tiles)
                yield pairs, (tiles, visible, owned(tiles, visible, earlier))
            earlier.append(Holder(layer, self.size))

    def near_work(self) -> Iterator[tuple[PairWork, Batch]]:
        """Causal features: the weights inside a block of positions, which the running sums leave out."""
        if self.features is None or not self.call.causal or self.how == "band":
            return
        pairs = PairWork(self.rows, self.keys, self.features, +1)
        for tiles in in_batches(band_tiles(Band(0, 0), self.size, CAUSAL_BLOCK)):
            visible = self.rows.visible(tiles)
            yield pairs, (tiles, visible, torch.zeros_like(visible))

    def _correction(self) -> tuple[FeatureRows | MeanFaces | None, int]:
        if self.call.double_count or self.how in ("none", "partition", "total"):
            return None, 0
        if self.branch is not None:
            return self.branch.faces, -1
        return self.features, +1 if self.how == "band" else -1

    def v1(self) -> Tensor:
        """[v, 1], the values under dropout."""
        v = self.keys.value
        if self.drop is not None:
            v = v * self.drop.keys(self.size).reshape(-1, 1).to(v.dtype)
        return torch.cat([v, torch.ones_like(v[:, :1])], 1)

    def forward(self) -> Tensor:
        """Fills rows.sums; returns the flat rows that had to be done densely."""
        if self.size.m == 0:
            return self.size.arange(0)
        if self.features is not None and self.plan is not None:
            states.add_states(self.rows, self.features, self.v1(), self.plan)
        if self.branch is not None:
            self.branch.forward()
        for work, batch in self.near_work():
            work.forward(*batch)
        mass = self._log_mass()
        for work, batch in self.work():
            work.forward(*batch)
        lost = self._lost_digits(mass)
        if lost.numel():
            fallback.forward(self, lost)
        return lost

    def _log_mass(self) -> Tensor:
        return torch.log(self.rows.sums.denominator.abs()) + self.rows.sums.log_scale

    def _lost_digits(self, before: Tensor) -> Tensor:
        """Rows whose sum is so far below what was added, or taken out, that rounding or underflow shows."""
        low = self.call.low_rank
        if self.features is None or not isinstance(low, Features) or self.call.double_count:
            return self.size.arange(0)
        signed = low.sign_phi is not None or low.sign_psi is not None
        limits = torch.finfo(self.rows.q.dtype)
        after, denominator = self._log_mass(), self.rows.sums.denominator
        lost = self.features.rho - after > -0.7 * math.log(limits.tiny)
        if self.how == "correction":
            lost |= before - after > math.log(1e-5 / limits.eps)
        lost |= torch.isnan(denominator) | ((denominator == 0) if signed else (denominator <= 0))
        lost &= ~torch.isneginf(self.features.rho)
        lost[-1] = False
        return lost.nonzero()[:, 0]


def run_forward(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out (G, N, E), and for the backward pass each row's log reference, denominator, and whether it was done densely."""
    g, n = call.q.shape[:2]
    out = call.v.new_zeros(g, n, call.v.shape[2])
    log_scale, denominator = call.q.new_zeros(g, n), call.q.new_zeros(g, n)
    dense = torch.zeros(g, n, dtype=torch.bool, device=call.q.device)
    for a, part in call.parts():
        heads = Heads(part)
        lost = heads.forward()
        b, sums = a + part.q.shape[0], heads.rows.sums
        out[a:b] = sums.output()[:-1].view(b - a, n, -1)
        log_scale[a:b] = sums.log_scale[:-1].view(b - a, n)
        denominator[a:b] = sums.denominator[:-1].view(b - a, n)
        dense[a:b].view(-1)[lost] = True
    return out, log_scale, denominator, dense


@dataclass(frozen=True)
class Saved:
    """What the forward pass leaves: (G, N) each, and out (G, N, E)."""

    out: Tensor
    log_scale: Tensor
    denominator: Tensor
    dense: Tensor

    def groups(self, a: int, b: int) -> Saved:
        return Saved(self.out[a:b], self.log_scale[a:b], self.denominator[a:b], self.dense[a:b])


def run_backward(call: Call, d_out: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v and, for features, log_phi and log_psi."""
    d_q, d_k, d_v = torch.zeros_like(call.q), torch.zeros_like(call.k), torch.zeros_like(call.v)
    low = call.low_rank
    d_phi = torch.zeros_like(low.log_phi) if isinstance(low, Features) else None
    d_psi = torch.zeros_like(low.log_psi) if isinstance(low, Features) else None
    if call.k.shape[1] == 0:
        return d_q, d_k, d_v, d_phi, d_psi
    for a, part in call.parts():
        b = a + part.q.shape[0]
        heads = Heads(part)
        _start_backward(heads, d_out[a:b], saved.groups(a, b))
        _backward_heads(heads)
        rows, keys = heads.rows, heads.keys
        assert rows.d_q is not None and keys.d_key is not None and keys.d_value is not None
        d_q[a:b] = rows.d_q[:-1].view_as(part.q)
        d_k[a:b] = keys.d_key.view_as(part.k)
        d_v[a:b] = keys.d_value.view_as(part.v)
        if d_phi is not None and d_psi is not None and heads.features is not None:
            assert heads.features.d_phi is not None and heads.features.d_psi is not None
            d_phi[a:b] = heads.features.d_phi[:-1].view_as(d_phi[a:b])
            d_psi[a:b] = heads.features.d_psi.view_as(d_psi[a:b])
    return d_q, d_k, d_v, d_phi, d_psi


def _start_backward(heads: Heads, d_out: Tensor, saved: Saved) -> None:
    rows = heads.rows
    spare = rows.q.new_zeros(1)
    out, grad = saved.out.reshape(-1, saved.out.shape[-1]), d_out.reshape(-1, d_out.shape[-1])
    den = torch.cat([saved.denominator.reshape(-1), spare])
    rows.inverse = torch.where(den == 0, 0.0, 1 / torch.where(den == 0, 1.0, den))
    rows.sums.log_scale = torch.cat([saved.log_scale.reshape(-1), spare - torch.inf])
    rows.d_out = torch.cat([grad, grad.new_zeros(1, grad.shape[1])])
    rows.delta = torch.cat([(grad * out).sum(-1), spare])
    rows.d_q = torch.zeros_like(rows.q)
    heads.keys.start_grad()
    if heads.features is not None:
        low = heads.features
        low.d_phi, low.d_psi = torch.zeros_like(low.phi), torch.zeros_like(low.psi)
        lost = saved.dense.reshape(-1).nonzero()[:, 0]
        if lost.numel():
            fallback.backward(heads, lost)


def _backward_heads(heads: Heads) -> None:
    rows, keys, low = heads.rows, heads.keys, heads.features
    assert rows.inverse is not None and rows.d_out is not None and rows.delta is not None and keys.d_value is not None
    if low is not None and heads.plan is not None:
        scale = torch.exp((low.rho - finite(rows.sums.log_scale)).clamp(max=0.0)) * rows.inverse
        g1 = torch.cat([rows.d_out, -rows.delta[:, None]], 1)
        v1 = heads.v1()
        d_v1 = torch.zeros_like(v1)
        states.add_state_grads(rows, low, v1, d_v1, low.phi * scale[:, None], g1, heads.plan)
        d_v = d_v1[:, :-1]
        keys.d_value += d_v if heads.drop is None else d_v * heads.drop.keys(heads.size).reshape(-1, 1).to(d_v.dtype)
    if heads.branch is not None:
        heads.branch.start_grad()
        heads.branch.backward()
    for work, batch in heads.near_work():
        work.backward(*batch)
    for work, batch in heads.work():
        work.backward(*batch)
    if heads.branch is not None:
        heads.branch.finish_grad()
