"""A recipe tried on some rows of captured attention at every threshold at once: error against entries, head by head.

Whether a cluster is visited or stands by its mean changes a row's sums of w, w^2 and w a by amounts that can be found
beforehand, so that a whole curve costs little more than a point.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..context import Context
from ..errors import require
from ..features import ClusterMeans
from ..impl import native
from ..lowrank import Means
from ..problem import Problem, check_inputs
from ..selection import Band, Blocks, Layer, Routes
from ..supports import Routed
from ..supports.clusters import node_means
from .measure import Capture

ROWS = 256


@dataclass(frozen=True)
class Curve:
    """Of each head (G, L): thresholds, entries a row, error, harm to the model's output and mass on visited clusters; visible (G,):
    entries of exact attention."""

    gain: Tensor
    entries: Tensor
    error: Tensor
    harm: Tensor
    mass: Tensor
    visible: Tensor


@dataclass(frozen=True)
class Exact:
    """Some rows as they are, (G, R, M): who is seen, logits, weights under each row's largest, and what the model makes of each
    pair (zero where that is not known); and their sums, (G, R). The same for every recipe."""

    seen: Tensor
    live: Tensor
    logits: Tensor
    top: Tensor
    a: Tensor
    pull: Tensor
    sum_a: Tensor
    sum_aa: Tensor
    sum_au: Tensor

    @classmethod
    def of(cls, p: Problem, ctx: Context, rows: Tensor, pull: Tensor | None) -> Exact:
        key = torch.arange(p.sizes[2], device=p.sizes[3])
        seen = ctx.visible[:, None] & (key <= rows[:, None]) if p.causal else ctx.visible[:, None].expand(-1, rows.numel(), -1)
        logits = (p.q[:, rows] * p.scale @ p.k.mT).masked_fill_(~seen, -torch.inf)
        top = logits.amax(-1, keepdim=True)
        top = torch.where(torch.isneginf(top), 0.0, top)
        a = (logits - top).exp_()
        u = a.new_zeros(()) if pull is None else pull.flatten(0, 1)[:, rows.to(pull.device)].to(a) @ p.v.mT
        live = ctx.active[:, rows].to(a.dtype)
        return cls(seen, live, logits, top, a, u, a.sum(-1).double(), a.square().sum(-1).double(), (a * u).sum(-1).double())


class Trial:
    """One capture under one recipe's parts; the thresholds are still open."""

    def __init__(self, capture: Capture, method: dict[str, Any], rows: Tensor, memo: dict[Any, Any] | None = None):
        c = capture
        self.p = p = check_inputs(c.q, c.k, c.v, c.key_mask, 0.0, c.causal, c.scale, c.k.shape[1] != c.q.shape[1])
        engine = None if native.refusal(c.q, c.k, c.v, 0.0) else native.Engine((native.isas() or ("",))[0], c.q, c.k, p.scale)
        ctx = p.context({} if memo is None else memo, engine, True)  # trials of one capture may share clusters
        support, low = method["support"], method["low_rank"]
        ok = isinstance(low, ClusterMeans) and low.fit == "queries"
        require(ok, "low_rank", "be cluster means fitted to queries", low, "try a recipe with means")
        parts = getattr(support, "parts", (support,))
        router = next((x for x in parts if isinstance(x, Routed)), None)
        with torch.no_grad():
            fixed = [layer for x in parts if x is not router for layer in x.select(ctx, {})]
            routes = None if router is None else router.routes(ctx)
            self.exact: Exact = ctx.remember(("exact", tuple(rows.tolist())), lambda: Exact.of(p, ctx, rows, c.pull))
            self._measure(p, ctx, rows, fixed, routes, low)
            self.rows_of = c.q.shape[2] / rows.numel()
        _, n, m, _ = p.sizes
        self.low_entries = low.entries(n, m, c.q.shape[3], c.causal)
        self.top = 1 if routes is None else routes.top

    def _measure(self, p: Problem, ctx: Context, rows: Tensor, fixed: list[Layer], routes: Routes | None, low: ClusterMeans) -> None:
        _, _, m, device = p.sizes
        key = torch.arange(m, device=device)
        x, q = self.exact, p.q[:, rows] * p.scale
        seen, a = x.seen, x.a
        held = torch.zeros_like(seen)
        for layer in fixed:
            held = held | row_mask(layer, rows, m)
        held = held & seen
        means = low.factor(ctx, {})
        assert means.offset is not None
        as_routes = Routes(means.node, means.nodes, 1, None, means.chunk, means.offset)
        mean, mass, _ = node_means(p.k, as_routes)
        score = q @ mean.mT
        at = means.node.clamp(min=0)[:, None].expand(-1, rows.numel(), -1)
        l_log = score.gather(2, at) + means.offset[:, None]
        if p.causal:
            near = ctx.remember(("inner", means.inner, tuple(rows.tolist())), lambda: self._inner(p, ctx, q, means))
            l_log = torch.where(key // means.chunk == rows[:, None] // means.chunk, near, l_log)
            l_log = torch.where(key // means.inner == rows[:, None] // means.inner, x.logits, l_log)
        low_w = l_log.masked_fill_(~seen, -torch.inf).sub_(x.top).exp_()
        self.visible, self.live = seen.sum(-1) * x.live, x.live
        w = torch.where(held, a, low_w)
        sums = w.sum(-1), w.square().sum(-1), (w * a).sum(-1), held.sum(-1).to(w.dtype), (w * x.pull).sum(-1), torch.zeros_like(w[..., 0])
        self.base = torch.stack(sums, -1).double()
        self._deltas(a, low_w, seen & ~held, rows, routes, score + mass[:, None])

    def _deltas(self, a: Tensor, low: Tensor, free: Tensor, rows: Tensor, routes: Routes | None, score: Tensor) -> None:
        """What visiting each node would add to a row's sums, and the score that decides: (G, R, nodes)."""
        if routes is None or routes.worth is None or routes.least is None:
            self.score, self.delta = score.new_full((*score.shape[:2], 1), -torch.inf), score.new_zeros(*score.shape[:2], 1, 6).double()
            return
        member = torch.zeros(a.shape[0], a.shape[2], routes.nodes + 1, device=a.device, dtype=a.dtype)
        member.scatter_(2, torch.where(routes.k_label < 0, routes.nodes, routes.k_label)[..., None], 1.0)
        member = member[..., :-1]
        free_w = free.to(a.dtype)
        a, low = a * free_w, low * free_w
        gap = a - low
        terms = (gap, a.square() - low.square(), a * gap, free_w, gap * self.exact.pull, a)
        self.delta = torch.stack([t @ member for t in terms], -1).double()
        if routes.chunk:
            node = torch.arange(routes.nodes, device=a.device)
            per_chunk = routes.nodes // -(-a.shape[2] // routes.chunk)
            score = score.masked_fill(node // per_chunk >= (rows // routes.chunk)[:, None], -torch.inf)
        share = score - torch.logsumexp(score, -1, keepdim=True)
        # least = gain - reach, with the gain of the recipe that was tried: 0
        self.score = (share + routes.worth[:, None] - routes.least[:, rows, None]).nan_to_num(nan=-torch.inf)
        self.score = self.score.masked_fill(self.live[..., None] == 0, -torch.inf)

    def _inner(self, p: Problem, ctx: Context, q: Tensor, means: Means) -> Tensor:
        """Logits of keys in the query's own chunk, by the means of their blocks."""
        m, offset = p.k.shape[1], means.offset_in
        blocks = torch.arange(m, device=q.device) // means.inner
        node = torch.where(ctx.visible, blocks, -1)
        routes = Routes(node, -(-m // means.inner), 1, None, 0, offset)
        mean, _, _ = node_means(p.k, routes)
        log = (q @ mean.mT).index_select(2, blocks)
        return log if offset is None else log + offset[:, None]

    def gains(self, levels: Tensor) -> Tensor:
        """Thresholds (G, L) at which `levels` (L,) entries a row go to visited clusters on the mean."""
        score, order = self.score.flatten(1).sort(-1, descending=True)
        spent = (self.delta[..., 3] * self.live[..., None]).flatten(1).gather(1, order).masked_fill(torch.isneginf(score), 0.0).cumsum(-1)
        want = levels.to(self.live.device)[None] * self.live.sum(-1, keepdim=True)
        at = torch.searchsorted(spent, want.double().contiguous()).clamp(max=score.shape[1] - 1)
        open_ = (~torch.isneginf(score)).sum(-1, keepdim=True)
        gain = score.gather(1, at.minimum((open_ - 1).clamp(min=0)))
        return torch.where(open_ > 0, gain, 0.0)

    def curve(self, gain: Tensor) -> Curve:
        """Entries and error at thresholds (G, L)."""
        entries, error, harm, mass = [], [], [], []
        kth = self.score.topk(min(self.top, self.score.shape[-1]), -1).values[..., -1:]
        live, rows = self.live.double(), self.live.sum(-1).clamp(min=1).double()
        sum_a = self.exact.sum_a.clamp(min=1e-300)
        square = self.exact.sum_aa / sum_a.square()
        norm = (live * square).sum(-1)
        for level in gain.unbind(1):
            taken = (self.score >= torch.maximum(level[:, None, None], kth)) & ~torch.isneginf(self.score)
            w1, w2, wa, count, wu, visited = (self.base + (self.delta * taken[..., None]).sum(2)).unbind(-1)
            total = w1.clamp(min=1e-300)
            gap = w2 / total.square() - 2 * wa / (total * sum_a) + square
            error.append(((gap.clamp(min=0) * live).sum(-1) / norm.clamp(min=1e-300)).sqrt())
            entries.append((count * live).sum(-1) / rows + self.low_entries)
            harm.append(((wu / total - self.exact.sum_au / sum_a).square() * live).sum(-1) * self.rows_of)
            mass.append((visited / sum_a * live).sum(-1) / rows)
        return Curve(gain, torch.stack(entries, 1), torch.stack(error, 1), torch.stack(harm, 1), torch.stack(mass, 1), self.visible.sum(-1) / rows)


def row_mask(layer: Layer, rows: Tensor, m: int) -> Tensor:
    """(G or 1, R, M): what a layer holds of some rows."""
    key = torch.arange(m, device=rows.device)
    if isinstance(layer, Band):
        far = key - rows[:, None]
        inside = far % layer.dilation == 0
        low, high = -math.inf if layer.lo is None else layer.lo * layer.dilation, math.inf if layer.hi is None else layer.hi * layer.dilation
        return (inside & (far >= low) & (far <= high))[None]
    require(isinstance(layer, Blocks) and layer.k_block == 1, "layer", "be a band or columns", type(layer).__name__, "try other parts")
    assert isinstance(layer, Blocks)
    index = layer.index[:, (rows // layer.q_block).clamp(max=layer.index.shape[1] - 1)]
    table = torch.zeros(*index.shape[:2], m + 1, dtype=torch.bool, device=rows.device)
    return table.scatter_(2, torch.where(index < 0, m, index), True)[..., :m]


def sample_rows(c: Capture, rows: int = ROWS, shift: float = 0.5) -> Tensor:
    """Evenly spread rows, all where they are few."""
    n = c.q.shape[2]
    if n <= rows:
        return torch.arange(n, device=c.q.device)
    return ((torch.arange(rows, device=c.q.device) + shift) * n / rows).long().clamp(max=n - 1)
