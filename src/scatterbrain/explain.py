"""What a call would do: method, implementation, entries, bytes, FLOPs, and why."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .config import Config, Sampled
from .functional import check_impl, choose
from .impl import native, op
from .impl.torch.engine import ENTRIES_AT_ONCE, strategy
from .impl.torch.tiles import ENTRIES_A_BATCH
from .lowrank import Features, LowRank
from .problem import DEFAULT, Problem, check_inputs, resolve
from .selection import Layer

CORRECTIONS = {
    "none": "no low-rank part",
    "total": "the low-rank weights of all keys, uncorrected",
    "means": "cluster means of all keys, less the mean's weight on the support, pair by pair",
    "band": "running sums around the window's tiles; nothing is subtracted",
    "partition": "each bucket receives the other buckets' sums; nothing is subtracted",
    "correction": "low-rank total, less the low-rank weight on the support, pair by pair",
}


@dataclass(frozen=True)
class Explanation:
    """Counts are for this input; entries are means over query rows."""

    support: str
    low_rank: str
    impl: str
    why: str
    correction: str
    entries_sparse: float
    entries_low_rank: float
    entries_full: float
    flops: float
    flops_full: float
    bytes: float
    bytes_full: float

    @property
    def budget(self) -> float:
        return (self.entries_sparse + self.entries_low_rank) / max(1e-9, self.entries_full)

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "budget": self.budget}

    def __str__(self) -> str:
        total = self.entries_sparse + self.entries_low_rank
        rows = [
            ("support", self.support),
            ("low-rank", self.low_rank),
            ("implementation", f"{self.impl}: {self.why}"),
            ("correction", self.correction),
            (
                "entries a row",
                f"{total:,.1f} = {self.entries_sparse:,.1f} exact + {self.entries_low_rank:,.1f} low-rank, of {self.entries_full:,.1f}",
            ),
            ("budget", f"{self.budget:.4f} of the visible entries"),
            ("FLOPs", f"{self.flops:.3g} forward, selection not counted; exact attention {self.flops_full:.3g}"),
            ("extra memory", f"{self.bytes / 2**20:,.1f} MiB forward, an estimate; the full matrix {self.bytes_full / 2**20:,.1f} MiB"),
        ]
        return "\n".join(f"{name:<15} {text}" for name, text in rows)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    support: Any = DEFAULT,
    low_rank: Any = DEFAULT,
    budget: float | None = None,
    double_count: bool = False,
    impl: str = "auto",
) -> Explanation:
    """What `attention` with the same arguments would run. Selects the support on this input and counts its pairs."""
    check_impl(impl, False)
    problem = check_inputs(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    method = resolve(support, low_rank, budget, double_count, problem)
    (g, n, m, _), d, e = problem.sizes, query.shape[3], value.shape[3]
    used, why, isa = impl, "asked for by name; dense, N x M", ""
    layers: tuple[Layer, ...] = ()
    low: LowRank | None = None
    with torch.no_grad():
        if g * n * m * e == 0:
            why = "the input is empty, so nothing runs"
        elif impl != "reference":
            choice = choose(problem, method, impl)
            isa, why = choice.isa, choice.why
            used = f"native-{isa}" if isa else "torch"
        if g * n * m:
            layers, low = problem.factors(method, native.Engine(isa, query, key, problem.scale) if isa else None)
        sparse = mean_row(count_pairs(problem, layers), problem)
    rank = 0.0 if method.low_rank is None else method.low_rank.config.entries(n, m, d, is_causal)  # type: ignore[attr-defined]
    visible = mean_row(visible_keys(problem), problem)
    per_pair, how = 2 * (d + e), strategy(layers, low, is_causal, double_count)
    return Explanation(
        _name(method.support, "none"),
        _name(method.low_rank, "none"),
        used,
        why,
        CORRECTIONS[how],
        sparse,
        rank,
        visible,
        g * n * (sparse * per_pair + _low_rank_flops(low, how, sparse, rank, d, e)),
        g * n * visible * per_pair,
        _bytes(problem, layers, low, used),
        g * n * m * problem.q.element_size(),
    )


def count_pairs(problem: Problem, layers: tuple[Layer, ...]) -> Tensor:
    """(G, N) distinct visible pairs of the selection, each row's: attention with zero logits counts them."""
    q = problem.q.new_zeros(problem.q.shape[0], problem.q.shape[1], 1)
    if not layers:
        return q[..., 0]
    k = problem.k.new_zeros(problem.k.shape[0], problem.k.shape[1], 1)
    counts = op.row_sums(q, k, k, layers, None, problem.key_mask, problem.causal)
    return counts


def visible_keys(problem: Problem) -> Tensor:
    g, n, m = problem.q.shape[0], problem.q.shape[1], problem.k.shape[1]
    mask = problem.key_mask if problem.key_mask is not None else problem.k.new_ones(g, m, dtype=torch.bool)
    if not problem.causal:
        return mask.sum(-1, keepdim=True).expand(g, n)
    upto = torch.nn.functional.pad(mask.to(torch.int64).cumsum(-1), (1, 0))
    return upto[:, torch.arange(1, n + 1, device=mask.device).clamp(max=m)]


def mean_row(per_row: Tensor, problem: Problem) -> float:
    """Mean over the rows that count: in self-attention a masked token's row does not."""
    mask = problem.key_mask
    if mask is None or mask.shape[1] != problem.q.shape[1]:
        return float(per_row.double().mean()) if per_row.numel() else 0.0
    return float((per_row * mask).double().sum() / mask.sum().clamp(min=1))


def _low_rank_flops(low: LowRank | None, how: str, sparse: float, rank: float, d: int, e: int) -> float:
    """A row's: features cost 2 R d each for q and k and 4 R E for the sums, means cost like entries; then the correction,
    R multiplications a pair for features, a look-up for means, and none where nothing is taken out."""
    if low is None:
        return 0.0
    if isinstance(low, Features):
        r = low.log_phi.shape[-1]
        return r * (4 * d + 4 * e) + 2 * r * sparse * (how == "correction")
    return rank * 2 * (d + e) + 2 * sparse * (how == "means")


def _bytes(problem: Problem, layers: tuple[Layer, ...], low: LowRank | None, impl: str) -> float:
    (g, n, m, _), d, e, size = problem.sizes, problem.query.shape[3], problem.value.shape[3], problem.q.element_size()
    if impl == "reference":
        return 6.0 * g * n * m * size
    held = sum(t.numel() * t.element_size() for layer in layers for t in vars(layer).values() if isinstance(t, Tensor))
    features = 0 if not isinstance(low, Features) else (low.log_phi.numel() + low.log_psi.numel()) * size
    rows = g * n * (e * problem.value.element_size() + 9)
    if impl.startswith("native"):  # a packed copy of keys, and features and sums, for each head in flight
        width = 0 if not isinstance(low, Features) else low.log_phi.shape[-1]
        return held + features + rows + min(g, torch.get_num_threads()) * size * (m * (d + width) + n * (e + width + 18))
    return held + features + rows + g * n * d * size + (6 * ENTRIES_A_BATCH + 4 * ENTRIES_AT_ONCE) * size


def _name(part: Sampled | None, none: str) -> str:
    config: Config | None = None if part is None else part.config
    return none if config is None else repr(config)
