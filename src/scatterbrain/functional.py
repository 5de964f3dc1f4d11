"""`attention`: scaled_dot_product_attention's names, order, layout and meaning, with a support and a low-rank map."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .config import LowRankMap, Sampled, Support
from .errors import require
from .impl import reference
from .impl import torch as torch_impl
from .problem import DEFAULT, Method, Problem, check_inputs, resolve
from .selection import take_groups

FEATURES_AT_ONCE = 2**26  # numbers held for backward: 256 MiB of float32
FEATURES_IN_CACHE = 2**23  # where nothing is held
IMPLEMENTATIONS = ("auto", "torch", "reference")
Part = Sampled | Literal["default"] | None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    support: Support | Part = DEFAULT,
    low_rank: LowRankMap | Part = DEFAULT,
    budget: float | None = None,
    double_count: bool = False,
    impl: str = "auto",
    return_weights: bool = False,
) -> Any:
    """Attention that is exact on `support` and estimated by `low_rank` elsewhere.

    query (B, H, N, D), key (B, H, M, D), value (B, H, M, E) -> (B, H, N, E), as in
    torch.nn.functional.scaled_dot_product_attention. Differences: `attn_mask` must say the same to every query
    (key padding), and may come together with is_causal=True.

    support, low_rank   parts, drawn by their own seed on each call, or `.sample()`d before. One given alone stands
                        alone; neither gives the default at `budget`, the share of the entries to spend (1/8).
    double_count        add the low-rank weights on the support too, as the naive sum does
    impl                "torch" (linear memory), "reference" (dense), "auto"; one asked for by name never falls back
    return_weights      also return the (B, H, N, M) weights; reference only
    """
    check_impl(impl, return_weights)
    problem = check_inputs(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    method = resolve(support, low_rank, budget, double_count, problem)
    (b, h, n, _), m, e = query.shape, key.shape[2], value.shape[3]
    if 0 in (b, h, n, m, e):
        nothing = sum(t[..., :0].sum() for t in (query, key, value))
        out = (query.new_zeros(b, h, n, e) + nothing).to(problem.out_dtype)
        return (out, query.new_zeros(b, h, n, m)) if return_weights else out
    with torch.autocast(query.device.type, enabled=False):
        seed = draw_seed(problem)
        if impl == "reference":
            dense, weights = _dense(problem, method, seed)
            out = dense.view(b, h, n, e).to(problem.out_dtype)
            return (out, weights.view(b, h, n, m)) if return_weights else out
        return _linear(problem, method, seed).view(b, h, n, e).to(problem.out_dtype)


def _dense(problem: Problem, method: Method, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    p, (layers, low) = problem, problem.factors(method)
    out, weights, _ = reference.attend(p.q * p.scale, p.k, p.v, layers, low, p.key_mask, p.causal, method.double_count, p.dropout_p, seed)
    return out, weights


def _linear(problem: Problem, method: Method, seed: Tensor | None) -> Tensor:
    """All heads at once, or, where their features would fill the memory, some at a time and again in backward."""
    memo: dict[Any, Any] = {}
    layers = problem.select(method, memo)

    def part(q: Tensor, k: Tensor, v: Tensor, start: int, stop: int) -> Tensor:
        p = dataclasses.replace(problem.groups(start, stop), q=q, k=k, v=v)
        cut = take_groups(layers, start, stop)
        low = p.factor(method, memo)
        return torch_impl.attend(q * p.scale, k, v, cut, low, p.key_mask, p.causal, method.double_count, p.dropout_p, seed, start)

    groups = problem.q.shape[0]
    width = 0 if method.low_rank is None else method.low_rank.config.width(problem.q.shape[2])  # type: ignore[attr-defined]
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (problem.q, problem.k, problem.v))
    limit = FEATURES_AT_ONCE if learns else FEATURES_IN_CACHE
    step = max(1, limit // max(1, (problem.q.shape[1] + problem.k.shape[1]) * width))
    if step >= groups or torch.compiler.is_compiling():
        return part(problem.q, problem.k, problem.v, 0, groups)
    cuts = [(a, min(a + step, groups)) for a in range(0, groups, step)]
    args = [(*(t[a:b] for t in (problem.q, problem.k, problem.v)), a, b) for a, b in cuts]
    return torch.cat([checkpoint(part, *arg, use_reentrant=False, preserve_rng_state=False) for arg in args])


def check_impl(impl: str, return_weights: bool) -> None:
    remedy = "use impl='torch'; the native engine is not part of this version" if impl == "native" else "use impl='auto'"
    require(impl in IMPLEMENTATIONS, "impl", f"be one of {', '.join(IMPLEMENTATIONS)}", impl, remedy)
    dense = impl == "reference" or not return_weights
    require(dense, "return_weights", "come with impl='reference'", f"impl={impl!r}", "weights are N x M, which only the reference holds")


def draw_seed(problem: Problem) -> Tensor | None:
    if problem.dropout_p == 0:
        return None
    return torch.randint(2**31, (), device=problem.q.device)
