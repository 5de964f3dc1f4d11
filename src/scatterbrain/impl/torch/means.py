"""Cluster means: attention over the means, each weighing as many keys as it stands for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...lowrank import Means
from ...partial import finite
from ...selection import Buckets, Layer
from .pairs import Dropout, MeanFaces, PairWork, Rows, Table
from .tiles import LARGEST_TABLE, Tiles, label_table, tiles_at_once


@dataclass
class Nodes:
    """Means of one level: what queries see (`table`, one row a node) and what stands for a key (`face`, one row a key)."""

    of_key: Tensor  # (G * M,) flat node of each key, the spare last one for none
    share: Tensor  # (G * M, 1) of each key in its node's mean
    table: Table
    face: Table


def build(keys: Table, node: Tensor, nodes: int, order: int, dropped: Tensor, log_weight: Tensor | None) -> Nodes:
    """node (G, M) in 0..nodes-1 or -1; `dropped` are the values under dropout; keys weigh exp(log_weight (G, M))."""
    groups = node.shape[0]
    offset = torch.arange(groups, device=node.device)[:, None] * nodes
    spare = groups * nodes
    of_key = torch.where(node < 0, spare, node + offset).flatten()
    log_mass, share = _masses(of_key, spare, keys.key, None if log_weight is None else log_weight.flatten())

    def mean(x: Tensor) -> Tensor:
        return x.new_zeros(spare + 1, x.shape[1]).index_add_(0, of_key, x * share)

    mu = mean(keys.key)
    var = mean((keys.key - mu.index_select(0, of_key)).square()) if order == 2 else None
    table = Table(mu, mean(dropped), nodes, log_mass, var)
    var_of_key = None if var is None else var.index_select(0, of_key)
    own = None if log_weight is None else log_weight.flatten().to(mu.dtype)
    return Nodes(of_key, share, table, Table(mu.index_select(0, of_key), keys.value, keys.per_group, own, var_of_key))


def _masses(of_key: Tensor, spare: int, like: Tensor, offset: Tensor | None) -> tuple[Tensor, Tensor]:
    """Each node's log mass, -inf where it is empty, and each key's share of it; the spare node has none."""
    if offset is None:
        offset = like.new_zeros(of_key.shape)
    offset = offset.to(like.dtype)
    top = finite(like.new_full((spare + 1,), -torch.inf).scatter_reduce_(0, of_key, offset, "amax"))
    weight = torch.exp(offset - top.index_select(0, of_key)).masked_fill(of_key == spare, 0.0)
    mass = like.new_zeros(spare + 1).index_add_(0, of_key, weight)
    share = weight / torch.where(mass > 0, mass, 1.0).index_select(0, of_key)
    return torch.log(mass) + top, share[:, None]


def give_back(nodes: Nodes, keys: Table, keep: Tensor | None) -> None:
    """Chain the gradients of means and variances to the keys and values they were made of."""
    table, face = nodes.table, nodes.face
    assert table.d_key is not None and face.d_key is not None and table.d_value is not None
    assert keys.d_key is not None and keys.d_value is not None
    d_mean = table.d_key.index_add_(0, nodes.of_key, face.d_key)
    keys.d_key += d_mean.index_select(0, nodes.of_key) * nodes.share
    if table.d_var is not None and face.d_var is not None:
        # the mean of squares around the mean: its derivative by the mean itself vanishes
        d_var = table.d_var.index_add_(0, nodes.of_key, face.d_var).index_select(0, nodes.of_key) * nodes.share
        keys.d_key += 2 * d_var * (keys.key - table.key.index_select(0, nodes.of_key))
    d_value = table.d_value.index_select(0, nodes.of_key) * nodes.share
    keys.d_value += d_value if keep is None else d_value * keep


class MeanBranch:
    """The low-rank total over all visible keys, and the faces that support tiles take out."""

    def __init__(self, means: Means, rows: Rows, keys: Table, dropout: Dropout | None, first: Layer | None):
        self.means, self.rows, self.keys = means, rows, keys
        self.routed = self._routed(first)
        self.keep = None if dropout is None else dropout.keys(rows.size).reshape(-1, 1).to(keys.value.dtype)
        dropped = keys.value if self.keep is None else keys.value * self.keep
        node = means.node.expand(rows.size.groups, -1)
        self.levels = [build(keys, node, means.nodes, means.order, dropped, means.offset)]
        if means.chunk:
            position = torch.arange(rows.size.m, device=node.device) // means.inner
            blocks = torch.where(node < 0, -1, position)
            self.levels.append(build(keys, blocks, -(-rows.size.m // means.inner), means.order, dropped, means.offset_in))
        inner = self.levels[1].face if means.chunk else None
        # a key alone stands for itself under the key's dropout, as the rest of the total does
        there = torch.zeros_like(keys.key[:, 0]).masked_fill(node.flatten() < 0, -torch.inf)
        self.alone = Table(keys.key, dropped, keys.per_group, there)
        plain = Table(keys.key, keys.value, keys.per_group)
        self.faces = MeanFaces(self.levels[0].face, inner, plain, means.chunk, means.inner)

    def _routed(self, first: Layer | None) -> Tensor | None:
        """(G * N, nodes + 1) bool where the first layer holds whole clusters: those means are left out, not taken out."""
        means, size = self.means, self.rows.size
        if not isinstance(first, Buckets) or first.k_label.shape != means.node.shape or not torch.equal(first.k_label, means.node):
            return None
        if size.n * means.nodes > LARGEST_TABLE:
            return None
        label = first.q_label.expand(size.groups, -1, -1).flatten(0, 1)
        return label_table(torch.where(label >= means.nodes, -1, label), means.nodes + 1)

    def forward(self) -> None:
        for table, tiles, own in self._work():
            PairWork(self.rows, table).forward(tiles, own, own)

    def backward(self) -> None:
        for table, tiles, own in self._work():
            PairWork(self.rows, table).backward(tiles, own, own)

    def start_grad(self) -> None:
        for level in self.levels:
            level.table.start_grad()
            level.face.start_grad()
            level.face.d_value = self.keys.d_value
        for table in (self.alone, self.faces.own):
            table.start_grad()
        self.faces.own.d_key = self.alone.d_key = self.keys.d_key

    def finish_grad(self) -> None:
        for level in self.levels:
            give_back(level, self.keys, self.keep)
        if self.alone.d_value is not None and self.keys.d_value is not None:
            self.keys.d_value += self.alone.d_value if self.keep is None else self.alone.d_value * self.keep

    def _work(self) -> Iterator[tuple[Table, Tiles, Tensor]]:
        means, size = self.means, self.rows.size
        if not means.chunk:
            yield from self._batches(self.levels[0].table, self._blocks(256), size.arange(means.nodes), None)
            return
        per_chunk = means.nodes // -(-size.m // means.chunk)
        for chunk in range(1, -(-size.n // means.chunk)):
            q = self._span(chunk * means.chunk, means.chunk, size.n)[None]
            past = min(chunk * per_chunk, means.nodes)
            yield from self._batches(self.levels[0].table, q, size.arange(past), None)
        yield from self._local(self.levels[1].table, means.chunk, means.inner)
        yield from self._local(self.alone, means.inner, 1)

    def _batches(self, table: Table, q: Tensor, k: Tensor, own: Tensor | None) -> Iterator[tuple[Table, Tiles, Tensor]]:
        """Query blocks (T, bq), the same for every group, against nodes (bk,) or (T, bk)."""
        groups = self.rows.size.groups
        group = torch.arange(groups, device=q.device).repeat_interleave(q.shape[0])[:, None]
        k = k.expand(q.shape[0], -1)
        tiles = Tiles(group, q.repeat(groups, 1), k.repeat(groups, 1))
        step = tiles_at_once(q.shape[1], k.shape[1])
        for start in range(0, group.shape[0], step):
            part = tiles.cut(start, start + step)
            seen = (part.k >= 0) & ~torch.isneginf(table.bias.index_select(0, table.rows(part)).view_as(part.k))  # type: ignore[union-attr]
            mask = seen[:, None] if own is None else seen[:, None] & own
            if self.means.offset is not None:  # a bias of any size would overflow in the spare row, whose reference is none
                mask = mask & (part.q >= 0)[..., None]
            if self.routed is not None and table is self.levels[0].table:
                row = (part.group * self.rows.size.n + part.q.clamp(min=0)).flatten()
                nodes = self.routed.index_select(0, row).view(*part.q.shape, -1)
                mask = mask & ~nodes[..., : part.k.shape[1]]
            yield table, part, mask

    def _local(self, table: Table, block: int, step: int) -> Iterator[tuple[Table, Tiles, Tensor]]:
        """Inside each block of `block` positions: queries against the nodes of `step` keys before (or at, for step 1) theirs."""
        size = self.rows.size
        start = size.arange(-(-size.n // block)) * block
        q = start[:, None] + size.arange(block)
        q = torch.where(q < size.n, q, -1)
        k = start[:, None] // step + size.arange(block // step)
        k = torch.where(k < -(-size.m // step), k, -1)
        row, node = size.arange(block)[:, None] // step, size.arange(block // step)
        yield from self._batches(table, q, k, node <= row if step == 1 else node < row)

    def _blocks(self, width: int) -> Tensor:
        start = (self.rows.size.arange(-(-self.rows.size.n // width)) * width)[:, None]
        q = start + self.rows.size.arange(width)
        return torch.where(q < self.rows.size.n, q, -1)

    def _span(self, start: int, width: int, end: int) -> Tensor:
        q = self.rows.size.arange(start, start + width)
        return torch.where(q < end, q, -1)
