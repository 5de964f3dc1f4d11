"""The truth: dense, any float dtype, no code shared with the fast implementations.

w_ij = exp(s q_i.k_j) on the support, l_ij off it, 0 where masked;  out_i = sum_j w_ij v_j / sum_j w_ij
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..lowrank import Features, LowRank, Means
from ..random import keep_key, keep_pair
from ..selection import Band, Blocks, Buckets, Groups, Layer, Rows


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layers: tuple[Layer, ...],
    low_rank: LowRank | None,
    key_mask: Tensor | None,
    causal: bool,
    double_count: bool = False,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q (G, N, D) already scaled, k (G, M, D), v (G, M, E) -> out (G, N, E), weights (G, N, M), support mask (G, N, M)."""
    (g, n, _), m = q.shape, k.shape[1]
    visible = torch.ones(g, n, m, dtype=torch.bool, device=q.device)
    if key_mask is not None:
        visible &= key_mask[:, None]
    if causal:
        visible &= torch.ones(n, m, dtype=torch.bool, device=q.device).tril()
    support = torch.zeros_like(visible)
    for layer in layers:
        support |= dense_mask(layer, n, m).to(q.device)
    support &= visible

    log_a = (q @ k.mT).masked_fill(~support, -torch.inf)
    log_l, sign = dense_low_rank(low_rank, q, k, causal)
    log_l = log_l.masked_fill(~visible if double_count else ~visible | support, -torch.inf)
    top = torch.maximum(log_a.amax(-1, keepdim=True), log_l.amax(-1, keepdim=True)) if m else q.new_zeros(g, n, 1)
    top = torch.where(torch.isneginf(top), 0.0, top).detach()
    w = torch.exp(log_a - top) + sign * torch.exp(log_l - top)
    total = w.sum(-1, keepdim=True)
    w = torch.where(total == 0, 0.0, w / torch.where(total == 0, 1.0, total))
    if dropout_p > 0 and seed is not None:
        group, i, j = (torch.arange(c, device=q.device) for c in (g, n, m))
        off = keep_key(seed, dropout_p, group[:, None, None], j)
        on = keep_pair(seed, dropout_p, group[:, None, None], i[:, None], j)
        w = w * torch.where(support, on, off).to(w.dtype)
    return w @ v, w, support


def dense_mask(layer: Layer, n: int, m: int) -> Tensor:
    match layer:
        case Band(lo, hi, step):
            d = torch.arange(m) - torch.arange(n)[:, None]
            low = torch.full_like(d, -n - m) if lo is None else torch.full_like(d, lo * step)
            high = torch.full_like(d, n + m) if hi is None else torch.full_like(d, hi * step)
            return (d >= low) & (d <= high) & (d % step == 0)
        case Blocks(index, q_block, k_block):
            table = torch.zeros(index.shape[0], index.shape[1], -(-m // k_block) + 1, dtype=torch.bool, device=index.device)
            table.scatter_(2, torch.where(index < 0, table.shape[2] - 1, index), True)
            i, j = torch.arange(n, device=index.device) // q_block, torch.arange(m, device=index.device) // k_block
            return table[:, i][:, :, j]
        case Rows(index):
            return (torch.arange(n, device=index.device)[:, None] == index[:, None]).any(-1)[..., None].expand(-1, n, m)
        case Buckets(q_label, k_label):
            same = q_label[:, :, None, :] == k_label[:, None, :, None]
            return (same & (k_label >= 0)[:, None, :, None]).any(-1)
        case Groups(q_index, k_index):
            has_q = (q_index[..., None] == torch.arange(n, device=q_index.device)).any(2)  # (G, T, N)
            has_k = (k_index[..., None] == torch.arange(m, device=k_index.device)).any(2)
            return (has_q[:, :, :, None] & has_k[:, :, None, :]).any(1)
    raise TypeError(f"{layer} is no layer of pairs")


def dense_low_rank(low_rank: LowRank | None, q: Tensor, k: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """log|l| and its sign, both (G, N, M)."""
    (g, n, _), m = q.shape, k.shape[1]
    one = q.new_ones(())
    if low_rank is None:
        return q.new_full((g, n, m), -torch.inf), one
    if isinstance(low_rank, Features):
        return _dense_features(low_rank)
    i, j = torch.arange(n, device=q.device)[:, None], torch.arange(m, device=q.device)
    log_l = _dense_means(low_rank, q, k, low_rank.node, low_rank.nodes, low_rank.offset)
    if causal:
        blocks = torch.where(low_rank.node < 0, -1, j // low_rank.inner)
        inner = _dense_means(low_rank, q, k, blocks, -(-m // low_rank.inner), low_rank.offset_in)
        log_l = torch.where(j // low_rank.chunk == i // low_rank.chunk, inner, log_l)
        log_l = torch.where(j // low_rank.inner == i // low_rank.inner, q @ k.mT, log_l)
    return log_l, one


def _dense_features(f: Features) -> tuple[Tensor, Tensor]:
    terms = f.log_phi[:, :, None, :] + f.log_psi[:, None, :, :]
    top = terms.amax(-1, keepdim=True)
    top = torch.where(torch.isneginf(top), 0.0, top).detach()
    signs = 1.0 if f.sign_phi is None else f.sign_phi[:, :, None, :]
    signs = signs if f.sign_psi is None else signs * f.sign_psi[:, None, :, :]
    total = (signs * torch.exp(terms - top)).sum(-1)
    zero = total == 0
    log = (torch.log(torch.where(zero, 1.0, total.abs())) + top[..., 0]).masked_fill(zero, -torch.inf)
    return log, torch.sign(total.detach())


def _dense_means(low_rank: Means, q: Tensor, k: Tensor, node: Tensor, nodes: int, offset: Tensor | None) -> Tensor:
    inside = node[:, None] == torch.arange(nodes, device=q.device)[:, None]  # (G, nodes, M)
    offset = q.new_zeros(node.shape) if offset is None else offset.to(q.dtype)
    member = torch.softmax(torch.where(inside, offset[:, None], -torch.inf), -1)
    member = torch.where(inside.any(-1, keepdim=True), member, 0.0)
    mean = member @ k
    log_l = q @ mean.mT
    if low_rank.order == 2:
        spread = member @ (k * k) - mean * mean
        log_l = log_l + torch.log1p(((q * q) @ spread.mT).clamp(min=0) / 2)
    return torch.gather(log_l, 2, node.clamp(min=0)[:, None].expand(-1, q.shape[1], -1)) + offset[:, None]
