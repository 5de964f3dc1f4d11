"""Layers turned into work: batches of tiles, each some queries against some keys, gathered by position.

Where a query row may stand twice in a batch the tiles say so (`repeats`); else a batch is merged row by row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...selection import Band, Blocks, Buckets, Groups, Layer, Rows

ENTRIES_A_BATCH = 2**20  # numbers in a batch's largest temporary: small enough for cache, and for malloc to reuse
ROW_WIDTH = 64  # what a gathered row is taken to hold
WIDEST = 4096  # keys a tile
FEW_LABELS = 4  # up to which comparing labels is faster than a table
LARGEST_TABLE = 2**27


@dataclass
class Tiles:
    """T tiles: q (T, bq) and k (T, bk) positions, -1 for none; group (T, 1); own (T, bq, bk) or None for all."""

    group: Tensor
    q: Tensor
    k: Tensor
    own: Tensor | None = None
    repeats: bool = False

    def cut(self, start: int, stop: int) -> Tiles:
        own = self.own
        if own is not None and own.shape[0] != 1:
            own = own[start:stop]
        return Tiles(self.group[start:stop], self.q[start:stop], self.k[start:stop], own, self.repeats)


@dataclass(frozen=True)
class Size:
    groups: int
    n: int
    m: int
    device: torch.device

    def arange(self, *args: int) -> Tensor:
        return torch.arange(*args, device=self.device)


def batches(layer: Layer, size: Size) -> Iterator[Tiles]:
    """All tiles of a layer, in batches of about PAIRS_AT_ONCE pairs."""
    if size.n == 0 or size.m == 0:
        return iter(())
    make = {Band: band_tiles, Blocks: block_tiles, Rows: row_tiles, Buckets: bucket_tiles, Groups: group_tiles}[type(layer)]
    return in_batches(make(layer, size))  # type: ignore[operator]


def in_batches(waves: Iterator[Tiles]) -> Iterator[Tiles]:
    for wave in waves:
        tiles, bq = wave.q.shape
        step = tiles_at_once(bq, wave.k.shape[1])
        for start in range(0, tiles, step):
            yield wave.cut(start, start + step)


def tiles_at_once(bq: int, bk: int) -> int:
    return max(1, ENTRIES_A_BATCH // max(1, bq * bk, bq * ROW_WIDTH, bk * ROW_WIDTH))


def band_block(layer: Band, size: Size) -> int:
    """Queries a tile: wide enough for a GEMM, narrow enough not to leave the band."""
    width = (layer.hi if layer.hi is not None else size.m) - (layer.lo if layer.lo is not None else -size.m) + 1
    return 128 if width >= 128 else 64 if width >= 32 else 32


def band_tiles(layer: Band, size: Size, block: int = 0) -> Iterator[Tiles]:
    """Blocks of consecutive queries (of one residue, when dilated) against the keys their band can reach."""
    step = layer.dilation
    lo, hi = (-size.n if layer.lo is None else layer.lo), (size.m if layer.hi is None else layer.hi)
    block = block or band_block(layer, size)
    rows, cols = -(-size.n // step), -(-size.m // step)
    start = (size.arange(-(-rows // block)) * block)[:, None, None]
    residue = size.arange(step)[None, :, None]
    q = ((start + size.arange(block)) * step + residue).reshape(-1, block)
    q = torch.where(q < size.n, q, -1)
    first, last = max(lo, -rows - block), min(block - 1 + hi, cols + block)
    for left in range(first, last + 1, WIDEST):
        offset = size.arange(left, min(left + WIDEST, last + 1))
        k = ((start + offset) * step + residue).reshape(-1, offset.numel())
        k = torch.where((k >= 0) & (k < size.m), k, -1)
        d = offset - size.arange(block)[:, None]
        own = ((d >= lo) & (d <= hi))[None]
        yield from _for_each_group(q, k, own, size)


def _for_each_group(q: Tensor, k: Tensor, own: Tensor | None, size: Size) -> Iterator[Tiles]:
    """The same tiles for every group."""
    tiles = q.shape[0]
    group = size.arange(size.groups)[:, None].repeat_interleave(tiles, 0)
    yield Tiles(group, q.repeat(size.groups, 1), k.repeat(size.groups, 1), own)


def block_tiles(layer: Blocks, size: Size) -> Iterator[Tiles]:
    index = layer.index.expand(size.groups, -1, -1)
    keys = index[..., None] * layer.k_block + size.arange(layer.k_block)
    keys = torch.where((index[..., None] >= 0) & (keys < size.m), keys, -1).flatten(2)  # (G, Q, C * k_block)
    if keys.shape[2] == 0:
        return
    q_block = min(layer.q_block, max(size.n, 1))
    part = min(q_block, 256)
    parts = -(-q_block // part)
    blocks = keys.shape[1]
    begin = (size.arange(blocks) * layer.q_block)[:, None, None] + (size.arange(parts) * part)[:, None]
    q = begin + size.arange(part)
    end = torch.clamp((size.arange(blocks) + 1) * layer.q_block, max=size.n)[:, None, None]
    q = torch.where(q < end, q, -1).view(1, -1, part).expand(size.groups, -1, -1).reshape(-1, part)
    group = size.arange(size.groups)[:, None].repeat_interleave(blocks * parts, 0)
    for left in range(0, keys.shape[2], WIDEST):
        k = keys[..., left : left + WIDEST].repeat_interleave(parts, 1).flatten(0, 1)
        yield Tiles(group, q, k)


def row_tiles(layer: Rows, size: Size) -> Iterator[Tiles]:
    q = layer.index.expand(size.groups, -1)
    q = torch.where(q < size.n, q, -1)
    for left in range(0, size.m, WIDEST):
        k = size.arange(left, min(left + WIDEST, size.m)).expand(size.groups, -1)
        yield Tiles(size.arange(size.groups)[:, None], q, k)


def group_tiles(layer: Groups, size: Size) -> Iterator[Tiles]:
    """One wave a group of tokens, since a query may sit in several; pairs of an earlier group are left out."""
    has_q, has_k = membership(layer.q_index, size.n, size.groups), membership(layer.k_index, size.m, size.groups)
    g = size.arange(size.groups)[:, None]
    for t in range(layer.q_index.shape[1]):
        q, k = layer.q_index[:, t].expand(size.groups, -1), layer.k_index[:, t].expand(size.groups, -1)
        earlier = has_q[g, q.clamp(min=0), :t].float() @ has_k[g, k.clamp(min=0), :t].float().mT
        yield Tiles(g, q, k, earlier == 0)


def membership(index: Tensor, length: int, groups: int) -> Tensor:
    """(G, length, T) bool from (G, T, b) positions."""
    table = torch.zeros(index.shape[0], index.shape[1], length + 1, dtype=torch.bool, device=index.device)
    table.scatter_(2, torch.where(index < 0, length, index), True)
    return table[:, :, :length].mT.expand(groups, -1, -1)


@dataclass
class Sorted:
    """Members of each bucket, contiguous in `order`: bucket b is order[start[b] : start[b] + count[b]]."""

    order: Tensor
    start: Tensor
    count: Tensor


def sort_by_label(label: Tensor, buckets: int) -> Sorted:
    """label (L,) in 0..buckets, where `buckets` itself means none."""
    order = label.argsort(stable=True)
    count = torch.bincount(label, minlength=buckets + 1)[:buckets]
    return Sorted(order, count.cumsum(0) - count, count)


def dense_labels(layer: Buckets, size: Size) -> tuple[Tensor, Tensor, int]:
    """Labels as small numbers, distinct between groups: q (G * N, T), k (G * M,), and the number of buckets."""
    k_raw = layer.k_label.expand(size.groups, -1)
    q_raw = layer.q_label.expand(size.groups, -1, -1)
    offset = size.arange(size.groups)[:, None]
    high = int(k_raw.max())
    if high < 0:
        return torch.zeros_like(q_raw).flatten(0, 1), torch.zeros_like(k_raw).flatten(), 0
    if high > 4 * (size.n + size.m):
        values = torch.unique(k_raw)
        place = torch.searchsorted(values, q_raw.contiguous()).clamp(max=values.numel() - 1)
        q_raw = torch.where((values[place] == q_raw) & (q_raw >= 0), place, -1)
        k_raw = torch.where(k_raw < 0, -1, torch.searchsorted(values, k_raw.contiguous()))
        high = values.numel() - 1
    span = high + 1
    none = span * size.groups
    q = torch.where((q_raw < 0) | (q_raw > high), none, q_raw + offset[..., None] * span)
    k = torch.where(k_raw < 0, none, k_raw + offset * span)
    return q.flatten(0, 1), k.flatten(), none


def tile_width(count: Tensor, widest: int) -> int:
    """The largest bucket if buckets are even, else about the mean member's share, so that little is padded."""
    full = count[count > 0].double()
    if full.numel() == 0:
        return 1
    top, mean = int(full.max()), float(full.mean())
    width = top if top <= 1.5 * mean else -(-int(mean) // 16) * 16
    return max(1, min(width, widest))


def bucket_tiles(layer: Buckets, size: Size) -> Iterator[Tiles]:
    """Queries sorted by bucket, once for each of their labels, so that a bucket's keys are loaded once for many."""
    q_label, k_label, buckets = dense_labels(layer, size)
    if buckets == 0:
        return
    visits = q_label.shape[1]
    keys, queries = sort_by_label(k_label, buckets), sort_by_label(q_label.flatten(), buckets)
    bk = tile_width(keys.count, 1024)
    waves = (keys.count + bk - 1) // bk
    reachable = torch.where(waves > 0, queries.count, 0)
    bq = tile_width(reachable, 256 if visits == 1 else 128)
    tiles = (reachable + bq - 1) // bq
    bucket = torch.repeat_interleave(size.arange(buckets), tiles)
    if bucket.numel() == 0:
        return
    nth = size.arange(bucket.numel()) - (tiles.cumsum(0) - tiles)[bucket]
    visit = members(queries, bucket, nth, bq)
    q = torch.where(visit < 0, -1, visit // visits)
    for wave in range(int(waves[bucket].max())):
        live = (waves[bucket] > wave).nonzero()[:, 0]
        k = members(keys, bucket[live], torch.full_like(live, wave), bk)
        group = q[live].amax(-1, keepdim=True) // size.n
        yield Tiles(group, _local(q[live], size.n), _local(k, size.m), repeats=visits > 1)


def members(of: Sorted, bucket: Tensor, nth: Tensor, width: int) -> Tensor:
    """(T, width) flat positions of the nth run of `width` members of each bucket, -1 beyond its end."""
    within = (nth * width)[:, None] + torch.arange(width, device=nth.device)
    place = of.start[bucket][:, None] + within
    flat = of.order.index_select(0, place.clamp(max=of.order.numel() - 1).flatten()).view_as(place)
    return torch.where(within < of.count[bucket][:, None], flat, -1)


def _local(flat: Tensor, length: int) -> Tensor:
    return torch.where(flat < 0, -1, flat % length)


class Holder:
    """Tells which pairs a layer holds, for any positions: how overlaps are found."""

    def __init__(self, layer: Layer, size: Size):
        self.layer, self.size = layer, size
        self.table: Tensor | None = None
        match layer:
            case Blocks(index, _, k_block):
                width = -(-size.m // k_block) + 1
                table = torch.zeros(index.shape[0], index.shape[1], width, dtype=torch.bool, device=index.device)
                self.table = table.scatter_(2, torch.where(index < 0, width - 1, index), True)
            case Rows(index):
                table = torch.zeros(index.shape[0], size.n + 1, dtype=torch.bool, device=index.device)
                self.table = table.scatter_(1, torch.where(index < 0, size.n, index), True)
            case Buckets():
                q, k, none = dense_labels(layer, size)
                span = none // size.groups + 1
                if q.shape[1] > FEW_LABELS and size.n * span <= LARGEST_TABLE:
                    row, key = (size.arange(x.shape[0])[:, None] // length for x, length in ((q, size.n), (k, size.m)))
                    self.table = label_table(torch.where(q == none, -1, q - row * (span - 1)), span)
                    self.k_label = torch.where(k == none, span - 1, k - key[:, 0] * (span - 1))
                else:
                    self.q_label = torch.where(q == none, -2, q).to(torch.int32)
                    self.k_label = torch.where(k == none, -1, k).to(torch.int32)
            case Groups(q_index, k_index):
                self.has_q = membership(q_index, size.n, size.groups).float()
                self.has_k = membership(k_index, size.m, size.groups).float()

    def __call__(self, tiles: Tiles) -> Tensor:
        """(T, bq | 1, bk | 1) bool."""
        g, i, j = tiles.group[..., None], tiles.q.clamp(min=0)[..., None], tiles.k.clamp(min=0)[:, None]
        match self.layer:
            case Band(lo, hi, step):
                d = j.to(torch.int32) - i.to(torch.int32)
                inside = (d % step == 0) if step > 1 else torch.ones_like(d, dtype=torch.bool)
                inside = inside if lo is None else inside & (d >= lo * step)
                return inside if hi is None else inside & (d <= hi * step)
            case Blocks(_, q_block, k_block):
                shape = self.layer.index.shape
                group = g if shape[0] > 1 else torch.zeros_like(g)
                if shape[1] == 1:
                    return self._look_up(group, j // k_block)
                return self._look_up(group * shape[1] + i // q_block, j // k_block)
            case Rows():
                return self._look_up(g if self.layer.index.shape[0] > 1 else torch.zeros_like(g), i)
            case Buckets():
                flat_q, flat_k = (g * self.size.n + i)[..., 0], (g * self.size.m + j)[:, 0]
                k = self.k_label.index_select(0, flat_k.flatten()).view(flat_k.shape)[:, None]
                if self.table is not None:
                    return self._look_up(flat_q[..., None], k)
                q = self.q_label.index_select(0, flat_q.flatten()).view(*flat_q.shape, -1)
                held = q[..., :1] == k
                for rank in range(1, q.shape[-1]):
                    held = held | (q[..., rank : rank + 1] == k)
                return held
            case Groups():
                return (self.has_q[g[..., 0], i[..., 0]] @ self.has_k[g[..., 0], j[:, 0]].mT) > 0
        raise TypeError(f"{self.layer} is no layer of pairs")

    def _look_up(self, row: Tensor, column: Tensor) -> Tensor:
        assert self.table is not None
        return torch.take(self.table, row * self.table.shape[-1] + column)


def label_table(label: Tensor, width: int) -> Tensor:
    """(L, width) bool: which of the labels 0..width-2 each row (L, T) has; the last column stays False."""
    table = torch.zeros(label.shape[0], width + 1, dtype=torch.bool, device=label.device)
    return table.scatter_(1, torch.where(label < 0, width, label), True)[:, :width].contiguous()
