"""Locality-sensitive hashing: cross-polytope, Reformer's and SMYRF's schemes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from ..config import Draw, Support
from ..context import Context
from ..errors import require, require_int
from ..selection import Buckets, Layer

SCHEMES = ("smyrf", "reformer", "cross_polytope")
FAR = 2**62


@dataclass(frozen=True)
class LSH(Support):
    """Pairs that fall into one bucket in at least one of `rounds` hashings.

    smyrf           keys and queries lifted by XBOX+, one random projection a round, cut into balanced clusters of
                    `bucket` keys (Daras et al. 2020). Not causal: the cut depends on the whole sequence.
    reformer        angular hash argmax [xR; -xR], sorted by bucket, chunks of `bucket` keys, each query sees its own
                    chunk and the one before (Kitaev et al. 2020). Causal: chunks are counted inside each bucket.
    cross_polytope  nearest signed axis after a random rotation (Andoni et al. 2015), equal in all `functions` of a
                    round. `bucket=None` keeps whole buckets, as in the paper's theorem; a number cuts them.
    """

    rounds: int = 1
    _: KW_ONLY
    bucket: int | None = 64
    scheme: str = "smyrf"
    functions: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        require_int(self.rounds, "rounds")
        require(self.scheme in SCHEMES, "scheme", f"be one of {', '.join(SCHEMES)}", self.scheme, "pick one of them")
        require_int(self.functions, "functions")
        require_int(self.seed, "seed", least=0)
        if self.bucket is None:
            require(self.scheme == "cross_polytope", "bucket", f"be an integer for {self.scheme}", None, "pass bucket=64")
        else:
            require_int(self.bucket, "bucket")
        single = self.functions == 1 or self.scheme == "cross_polytope"
        require(single, "functions", f"be 1 for {self.scheme}", self.functions, "use scheme='cross_polytope'")

    def causal_refusal(self) -> str:
        if self.scheme != "smyrf":
            return ""
        return "SMYRF's balanced clusters are cut from a sort over the whole sequence, so later tokens move earlier ones; use scheme='reformer'"

    def draw(self, head_dim: int, draw: Draw) -> dict[str, Tensor]:
        if self.scheme == "smyrf":
            return {"projection": draw.normal(self.rounds, head_dim + 2)}
        count = self.rounds * self.functions
        return {"rotation": draw.rotations(count, head_dim).view(self.rounds, self.functions, head_dim, head_dim)}

    def select(self, ctx: Context, state: Mapping[str, Tensor]) -> tuple[Layer, ...]:
        make = {"smyrf": self._smyrf, "reformer": self._reformer, "cross_polytope": self._cross_polytope}[self.scheme]
        with torch.no_grad():
            return tuple(make(ctx, state, r) for r in range(self.rounds))

    def _smyrf(self, ctx: Context, state: Mapping[str, Tensor], r: int) -> Layer:
        q, k = xbox_plus(ctx)
        a = state["projection"][r]
        q_rank = rank_of(q @ a, ctx.active)
        k_rank = rank_of(k @ a, ctx.visible)
        clusters = _ceil(ctx.key_count, self.bucket)
        q_label = (q_rank * clusters[:, None] // ctx.query_count[:, None]).clamp(max=clusters[:, None] - 1)
        k_label = k_rank * clusters[:, None] // ctx.key_count[:, None]
        return Buckets(q_label[..., None], torch.where(ctx.visible, k_label, -1))

    def _reformer(self, ctx: Context, state: Mapping[str, Tensor], r: int) -> Layer:
        half = (_ceil(ctx.key_count, self.bucket) + 1) // 2  # as many buckets as chunks, two a rotated axis
        axes = half.clamp(1, ctx.q.shape[-1])[:, None, None]
        q_code, k_code = (signed_axis(x @ state["rotation"][r, 0], axes) for x in (ctx.q, ctx.k))
        if ctx.causal:
            return look_back_in_bucket(ctx, q_code, k_code, self.bucket or 1)
        q_place, k_place = place_in_sorted(ctx, q_code, k_code)
        chunks = _ceil(ctx.key_count, self.bucket)[:, None]
        own = (q_place // (self.bucket or 1)).clamp(max=chunks - 1)
        before = torch.where(chunks > 1, (own - 1) % chunks, -1)
        k_label = torch.where(ctx.visible, k_place // (self.bucket or 1), -1)
        return Buckets(torch.stack([own, before], -1), k_label)

    def _cross_polytope(self, ctx: Context, state: Mapping[str, Tensor], r: int) -> Layer:
        q_code, k_code = (cross_polytope(x, state["rotation"][r]) for x in (ctx.q, ctx.k))
        if self.bucket is None:
            return Buckets(q_code[..., None], torch.where(ctx.visible, k_code, -1))
        if ctx.causal:
            return look_back_in_bucket(ctx, q_code, k_code, self.bucket)
        q_place, k_place = place_in_sorted(ctx, q_code, k_code)
        start = bucket_start(ctx, k_code, k_code)
        q_start = bucket_start(ctx, k_code, q_code)
        return Buckets(
            (q_code * FACTOR + (q_place - q_start) // self.bucket)[..., None],
            torch.where(ctx.visible, k_code * FACTOR + (k_place - start) // self.bucket, -1),
        )

    def entries(self, n: int, m: int, dim: int, causal: bool) -> float:
        if self.bucket is None:
            return min(m, self.rounds * m / (2.0 ** min(60, 6 * self.functions)))
        width = self.bucket * (2 if self.scheme == "reformer" and not causal else 1.5 if causal else 1)
        return min(m / 2 if causal else m, self.rounds * width)


FACTOR = 2**24  # room for chunk numbers below a bucket code


def xbox_plus(ctx: Context) -> tuple[Tensor, Tensor]:
    """Lift queries and keys so that Euclidean distance orders the pairs as the inner product does."""
    q2, k2 = ctx.q.square().sum(-1, keepdim=True), ctx.k.square().sum(-1, keepdim=True)
    top = q2.masked_fill(~ctx.active[..., None], 0.0).amax(1, keepdim=True) + k2.masked_fill(~ctx.visible[..., None], 0.0).amax(1, keepdim=True)
    zero = torch.zeros_like
    q = torch.cat([ctx.q, zero(q2), (top - q2).clamp(min=0).sqrt()], -1)
    k = torch.cat([ctx.k, (top - k2).clamp(min=0).sqrt(), zero(k2)], -1)
    return q, k


def rank_of(value: Tensor, mask: Tensor) -> Tensor:
    """Rank (G, N) of each value among the masked-in ones of its row; the others come last."""
    order = value.masked_fill(~mask, float("inf")).argsort(dim=-1, stable=True)
    ranks = torch.arange(value.shape[-1], device=value.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, ranks)


def signed_axis(rotated: Tensor, axes: Tensor | None = None) -> Tensor:
    """Index of the largest of [x; -x], in 0..2d-1; only the first `axes` coordinates count if given."""
    size = rotated.abs()
    if axes is not None:
        size = size.masked_fill(torch.arange(rotated.shape[-1], device=rotated.device) >= axes, -1.0)
    axis = size.argmax(-1, keepdim=True)
    return (2 * axis + (rotated.gather(-1, axis) < 0)).squeeze(-1)


def cross_polytope(x: Tensor, rotation: Tensor) -> Tensor:
    """One code from K functions (K, D, D): equal iff all K hashes are equal (up to a 64-bit mix when K > 4)."""
    code = torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)
    for f in range(rotation.shape[0]):
        code = code * (2 * x.shape[-1]) + signed_axis(x @ rotation[f])
        code = code % 549755813881  # a prime below 2**39, so that FACTOR still fits above it
    return code


def bucket_start(ctx: Context, k_code: Tensor, code: Tensor) -> Tensor:
    """How many visible keys have a smaller code than `code`."""
    keys = torch.where(ctx.visible, k_code, FAR).sort(-1).values
    return torch.searchsorted(keys, code.contiguous())


def place_in_sorted(ctx: Context, q_code: Tensor, k_code: Tensor) -> tuple[Tensor, Tensor]:
    """Place of each key in the order (code, position), and where each query would stand among the keys.

    A query's rank inside its bucket is stretched to the bucket's number of keys; for shared queries and keys both
    places are the same.
    """
    keys = torch.where(ctx.visible, k_code, FAR)
    k_place = _order(keys)
    queries = torch.where(ctx.active, q_code, FAR)
    q_sorted, k_sorted = queries.sort(-1).values, keys.sort(-1).values
    rank = _order(queries) - torch.searchsorted(q_sorted, queries)
    size_q = torch.searchsorted(q_sorted, queries, right=True) - torch.searchsorted(q_sorted, queries)
    start = torch.searchsorted(k_sorted, q_code.contiguous())
    size_k = torch.searchsorted(k_sorted, q_code.contiguous(), right=True) - start
    return start + rank * size_k // size_q, k_place


def look_back_in_bucket(ctx: Context, q_code: Tensor, k_code: Tensor, size: int) -> Buckets:
    """Causal chunks: the keys of a bucket are counted off in order of position, `size` a chunk; a query sees the
    chunk that the count has reached and the one before it. Nothing depends on later tokens."""
    span = max(ctx.n, ctx.m) + 1
    position = torch.arange(ctx.m, device=k_code.device)
    keys = torch.where(ctx.visible, k_code * span + position, FAR).sort(-1).values
    until = torch.arange(1, ctx.n + 1, device=q_code.device)
    reached = torch.searchsorted(keys, q_code * span + until) - torch.searchsorted(keys, q_code * span)
    earlier = torch.searchsorted(keys, k_code * span + position) - torch.searchsorted(keys, k_code * span)
    chunk = (reached - 1).clamp(min=0) // size
    own = q_code * FACTOR + chunk
    labels = torch.stack([own, torch.where(chunk > 0, own - 1, -1)], -1)
    return Buckets(labels, torch.where(ctx.visible, k_code * FACTOR + earlier // size, -1))


def _order(key: Tensor) -> Tensor:
    order = key.argsort(dim=-1, stable=True)
    return torch.empty_like(order).scatter_(-1, order, torch.arange(key.shape[-1], device=key.device).expand_as(order))


def _ceil(count: Tensor, size: int | None) -> Tensor:
    return (count + (size or 1) - 1) // (size or 1)
