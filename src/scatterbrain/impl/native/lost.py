"""Rows whose running sums lost their digits: done densely, by the one piece of code that both engines have for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...lowrank import Features
from ...selection import take_groups
from ..torch import fallback
from ..torch.engine import Call, Heads

if TYPE_CHECKING:
    from .engine import NativeCall


def forward(call: NativeCall, dense: Tensor, out: Tensor, log_scale: Tensor, denominator: Tensor) -> None:
    """Overwrite the rows that `dense` (B, H, N) marks."""
    for b, h, heads, rows in _heads(call, dense):
        fallback.forward(heads, rows)
        sums = heads.rows.sums
        out[b, h, rows] = sums.output()[rows].to(out.dtype)
        log_scale[b, h, rows] = sums.log_scale[rows]
        denominator[b, h, rows] = sums.denominator[rows]


def backward(call: NativeCall, dense: Tensor, d_out: Tensor, log_scale: Tensor, inverse: Tensor, delta: Tensor, to: tuple[Tensor, ...]) -> None:
    """Add these rows' gradients."""
    d_q, d_k, d_v, d_phi, d_psi = to
    for b, h, heads, rows in _heads(call, dense):
        r, keys, low, g = heads.rows, heads.keys, heads.features, b * dense.shape[1] + h
        assert low is not None
        spare = r.q.new_zeros(1)
        r.sums.log_scale = torch.cat([log_scale[b, h], spare - torch.inf])
        r.inverse, r.delta = torch.cat([inverse[b, h], spare]), torch.cat([delta[b, h], spare])
        r.d_out = torch.cat([d_out[b, h].float(), r.q.new_zeros(1, d_out.shape[3])])
        r.d_q = torch.zeros_like(r.q)
        keys.start_grad()
        low.d_phi, low.d_psi = torch.zeros_like(low.phi), torch.zeros_like(low.psi)
        fallback.backward(heads, rows)
        assert keys.d_key is not None and keys.d_value is not None
        d_q[b, h] += (r.d_q[:-1] * call.scale).to(d_q.dtype)
        d_k[b, h] += keys.d_key.to(d_k.dtype)
        d_v[b, h] += keys.d_value.to(d_v.dtype)
        d_phi[g] += low.d_phi[:-1]
        d_psi[g] += low.d_psi


def _heads(call: NativeCall, dense: Tensor) -> Iterator[tuple[int, int, Heads, Tensor]]:
    """The torch engine's state of each head that has such rows."""
    low, rep = call.low_rank, call.q.shape[1] // call.k.shape[1]
    assert isinstance(low, Features)
    for b, h in dense.any(-1).nonzero().tolist():
        g = b * dense.shape[1] + h
        q, k, v = call.q[b, h].float() * call.scale, call.k[b, h // rep].float(), call.v[b, h // rep].float()
        mask = None if call.key_mask is None else call.key_mask[g : g + 1]
        if mask is not None:
            k, v = (t.masked_fill(~mask[0, :, None], 0.0) for t in (k, v))
        part = Features(low.log_phi[g : g + 1], low.log_psi[g : g + 1])
        layers = take_groups(call.layers, g, g + 1)
        one = Call(q[None], k[None], v[None], layers, part, mask, call.causal, call.double_count, 0.0, None)
        yield b, h, Heads(one), dense[b, h].nonzero()[:, 0]
