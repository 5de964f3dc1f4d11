"""Feature maps in linear time: running sums of psi_j [v_j, 1] over stretches of keys.

Keys are cut into segments, queries into blocks; block b receives the segments before `upto[b]` and from `onward[b]`.
Total, causal prefix, what a window leaves, and what a bucket leaves are all of this form; every term is added,
none is taken out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...partial import Partial
from .pairs import FeatureRows, Rows, add_rows
from .tiles import Sorted, members

ROWS_AT_ONCE = 2**22  # gathered feature entries held at a time


@dataclass
class Plan:
    """Flat positions (-1 pads): key tiles (Tk, bk) of segment key_of (Tk,), query tiles (Tq, bq) of block query_of (Tq,).

    Segments are numbered group by group, `segments` a group; blocks likewise, `blocks` a group.
    """

    keys: Tensor
    key_of: Tensor
    queries: Tensor
    query_of: Tensor
    groups: int
    segments: int
    blocks: int
    upto: Tensor  # (blocks,)
    onward: Tensor  # (blocks,)


def by_position(rows: Rows, block: int, lo: int, hi: int, causal: bool) -> Plan:
    """Blocks of `block` queries; block b is left the keys before b * block + lo and after its last query + hi."""
    size = rows.size
    n, m = size.n, size.m
    start = size.arange(-(-n // block)) * block
    left, right = (start + lo).clamp(0, m), (start + block + hi).clamp(0, m)
    edges = torch.cat([left, right[:0] if causal else right, size.arange(0, m, max(block, 1)), size.arange(m, m + 1)])
    edges = torch.unique(edges)
    count = edges[1:] - edges[:-1]
    segments = count.numel()
    tiles = members(Sorted(size.arange(max(m, 1)), edges[:-1], count), size.arange(segments), torch.zeros_like(count), block)
    upto = torch.searchsorted(edges, left)
    onward = torch.full_like(upto, segments) if causal else torch.searchsorted(edges, right)
    queries = start[:, None] + size.arange(block)
    queries = torch.where(queries < n, queries, -1)
    return _every_group(size.groups, tiles, queries, n, m, upto, onward)


def total(rows: Rows) -> Plan:
    """Every query receives every key."""
    size = rows.size
    one = size.arange(1, 2)
    return _every_group(size.groups, size.arange(size.m)[None], size.arange(size.n)[None], size.n, size.m, one, one)


def _every_group(groups: int, keys: Tensor, queries: Tensor, n: int, m: int, upto: Tensor, onward: Tensor) -> Plan:
    g = torch.arange(groups, device=keys.device)[:, None, None]
    k = torch.where(keys < 0, -1, keys + g * m).flatten(0, 1)
    q = torch.where(queries < 0, -1, queries + g * n).flatten(0, 1)
    key_of, query_of = (torch.arange(x.shape[0], device=x.device) for x in (k, q))
    return Plan(k, key_of, q, query_of, groups, keys.shape[0], queries.shape[0], upto, onward)


def by_bucket(rows: Rows, q_label: Tensor, k_label: Tensor, buckets: int) -> Plan:
    """Each bucket is left the keys of the other buckets. Keys and queries without a bucket go to one more."""
    size = rows.size
    per_group = buckets // size.groups + 1
    q_group = torch.arange(q_label.numel(), device=q_label.device) // size.n
    k_group = torch.arange(k_label.numel(), device=k_label.device) // size.m
    q, k = _with_rest(q_label, q_group, buckets, per_group), _with_rest(k_label, k_group, buckets, per_group)
    of_q, of_k = (_sort(x, per_group * size.groups) for x in (q, k))
    keys, key_of = _tiles(of_k)
    queries, query_of = _tiles(of_q)
    bucket = size.arange(per_group)
    # the last bucket holds what has none: it is left everything, its own keys included
    onward = torch.where(bucket == per_group - 1, bucket, bucket + 1)
    return Plan(keys, key_of, queries, query_of, size.groups, per_group, per_group, bucket, onward)


def _with_rest(label: Tensor, group: Tensor, none: int, per_group: int) -> Tensor:
    local = torch.where(label == none, per_group - 1, label - group * (per_group - 1))
    return local + group * per_group


def _sort(label: Tensor, buckets: int) -> Sorted:
    count = torch.bincount(label, minlength=buckets)
    return Sorted(label.argsort(stable=True), count.cumsum(0) - count, count)


def _tiles(of: Sorted) -> tuple[Tensor, Tensor]:
    mean = -(-int(of.count.sum()) // max(1, int((of.count > 0).sum())))
    width = max(1, min(int(of.count.max()), max(16, mean), 512))
    tiles = (of.count + width - 1) // width
    bucket = torch.repeat_interleave(torch.arange(tiles.numel(), device=tiles.device), tiles)
    nth = torch.arange(bucket.numel(), device=tiles.device) - (tiles.cumsum(0) - tiles)[bucket]
    return members(of, bucket, nth, width), bucket


def add_states(rows: Rows, low: FeatureRows, v1: Tensor, plan: Plan) -> None:
    """Forward: v1 (G * M, E + 1) is [v, 1]."""
    received = _receive(_collect(low.psi, v1, plan.keys, plan.key_of, plan.groups * plan.segments), plan)
    for index, block in _query_parts(plan, low.phi.shape[1]):
        phi = _padded(low.phi, index)
        got = (phi @ received.index_select(0, block)).flatten(0, 1)
        flat = torch.where(index < 0, rows.size.groups * rows.size.n, index).flatten()
        part = Partial(got[:, :-1], got[:, -1], low.rho.index_select(0, flat))
        add_rows(rows.sums, flat, part)


def add_state_grads(rows: Rows, low: FeatureRows, v1: Tensor, d_v1: Tensor, phi: Tensor, g1: Tensor, plan: Plan) -> None:
    """Backward: phi normalised (rows sum to one), g1 (G * N + 1, E + 1) is [d_out, -delta]."""
    assert low.d_phi is not None and low.d_psi is not None
    received = _receive(_collect(low.psi, v1, plan.keys, plan.key_of, plan.groups * plan.segments), plan)
    for index, block in _query_parts(plan, phi.shape[1]):
        flat = torch.where(index < 0, rows.size.groups * rows.size.n, index).flatten()
        d = _padded(g1, index) @ received.index_select(0, block).mT
        low.d_phi.index_add_(0, flat, (d * _padded(phi, index)).flatten(0, 1))
    sent = _send(_collect(phi, g1, plan.queries, plan.query_of, plan.groups * plan.blocks), plan)
    step = max(1, ROWS_AT_ONCE // max(1, plan.keys.shape[1] * phi.shape[1]))
    for index, segment in zip(plan.keys.split(step), plan.key_of.split(step), strict=True):
        state = sent.index_select(0, segment)
        psi, flat = _padded(low.psi, index), index.clamp(min=0).flatten()
        low.d_psi.index_add_(0, flat, (psi * (_padded(v1, index) @ state.mT)).flatten(0, 1))
        d_v1.index_add_(0, flat, (psi @ state).flatten(0, 1))


def _collect(x: Tensor, y: Tensor, tiles: Tensor, owner: Tensor, owners: int) -> Tensor:
    """sum over the members of each owner of x_j' y_j: (owners, R, E + 1)."""
    out = x.new_zeros(owners, x.shape[1], y.shape[1])
    step = max(1, ROWS_AT_ONCE // max(1, tiles.shape[1] * x.shape[1]))
    for index, own in zip(tiles.split(step), owner.split(step), strict=True):
        out.index_add_(0, own, _padded(x, index).mT @ _padded(y, index))
    return out


def _receive(states: Tensor, plan: Plan) -> Tensor:
    """Segment sums -> what each block receives: the segments before upto, and from onward."""
    s = states.view(plan.groups, plan.segments, *states.shape[1:])
    pad = s.new_zeros(plan.groups, 1, *states.shape[1:])
    before = torch.cat([pad, s.cumsum(1)], 1).index_select(1, plan.upto)
    if bool((plan.onward < plan.segments).any()):
        after = torch.cat([s.flip(1).cumsum(1).flip(1), pad], 1).index_select(1, plan.onward)
        before += after
    return before.flatten(0, 1)


def _send(states: Tensor, plan: Plan) -> Tensor:
    """The transpose of _receive: block sums -> what each segment gave them."""
    s = states.view(plan.groups, plan.blocks, *states.shape[1:])
    shape = (plan.groups, plan.segments + 1, *states.shape[1:])
    before = s.new_zeros(shape).index_add_(1, plan.upto, s)
    out = before.flip(1).cumsum(1).flip(1)[:, 1:]
    if bool((plan.onward < plan.segments).any()):
        out = out + s.new_zeros(shape).index_add_(1, plan.onward, s).cumsum(1)[:, :-1]
    return out.flatten(0, 1)


def _query_parts(plan: Plan, width: int) -> list[tuple[Tensor, Tensor]]:
    step = max(1, ROWS_AT_ONCE // max(1, plan.queries.shape[1] * width))
    return list(zip(plan.queries.split(step), plan.query_of.split(step), strict=True))


def _padded(x: Tensor, index: Tensor) -> Tensor:
    """x at flat positions (T, b); zeros where -1."""
    got = x.index_select(0, index.clamp(min=0).flatten()).view(*index.shape, x.shape[1])
    return got.masked_fill_((index < 0)[..., None], 0.0) if bool((index < 0).any()) else got
