"""`attention`: scaled_dot_product_attention's names, order, layout and meaning, with a support and a low-rank map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .config import LowRankMap, Sampled, Support
from .errors import require
from .impl import native, op, reference
from .lowrank import Means
from .problem import DEFAULT, Method, Problem, check_inputs, resolve
from .selection import Layer, take_groups

FEATURES_AT_ONCE = 2**26  # numbers held for backward: 256 MiB of float32
FEATURES_IN_CACHE = 2**23  # where nothing is held
NATIVE = tuple(f"native-{isa}" for isa in native.library.ISAS)
IMPLEMENTATIONS = ("auto", "native", "torch", "reference")
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
    impl                "native" (C++ on CPUs), "torch" (any device; both have linear memory), "reference" (dense), or
                        "auto"; one asked for by name never falls back. "native-avx2" and so on name its instructions
    return_weights      also return the (B, H, N, M) weights; reference only
    """
    check_impl(impl, return_weights)
    problem = check_inputs(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if not torch.compiler.is_compiling():
        native.library.after_fork()
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
        return _linear(problem, method, seed, impl).view(b, h, n, e).to(problem.out_dtype)


@dataclass(frozen=True)
class Choice:
    """What will run: an instruction set of the native engine or, where that is empty, torch; why; the selection; and cluster
    means, which belong to it, where they are the low-rank part."""

    isa: str
    why: str
    layers: tuple[Layer, ...]
    means: Means | None


def choose(problem: Problem, method: Method, impl: str) -> Choice:
    """Select the support for whoever runs, since the native engine makes its own routes."""
    by_name = impl.startswith("native")
    why = native.refusal(problem.query, problem.key, problem.value, problem.dropout_p)
    isa = impl.partition("-")[2] or (native.isas() or ("",))[0]
    if by_name and not why and isa not in native.isas():
        why = f"the native engine for {isa} is not built here, or the processor lacks it"
    if impl == "torch" or (why and not by_name):
        return _chosen(problem, method, "", "asked for by name" if impl == "torch" else why, None, False)
    require(not why, "impl", "be able to run what is asked", impl, f"{why}; or use impl='auto'")
    engine = native.Engine(isa, problem.query, problem.key, problem.scale)
    choice = _chosen(problem, method, isa, "asked for by name" if by_name else "the fastest that covers this on a CPU", engine, True)
    low = None if method.low_rank is None else method.low_rank.config
    features = low is not None and choice.means is None
    why = native.method_refusal(choice.layers, choice.means, features, features and low.signed, method.double_count)  # type: ignore[union-attr]
    require(not (why and by_name), "impl", "be able to run what is asked", impl, f"{why}; or use impl='auto'")
    return _chosen(problem, method, "", why, None, False) if why else choice


def _chosen(problem: Problem, method: Method, isa: str, why: str, engine: native.Engine | None, lazy: bool) -> Choice:
    memo: dict[Any, Any] = {}
    layers = problem.select(method, memo, engine, lazy)
    means = None
    if method.low_rank is not None and width_of(problem, method) == 0:
        found = problem.factor(method, memo, engine)
        assert isinstance(found, Means)
        means = found
    return Choice(isa, why, layers, means)


def width_of(problem: Problem, method: Method) -> int:
    """Features a row, 0 for cluster means and for no low-rank part."""
    return 0 if method.low_rank is None else method.low_rank.config.width(problem.query.shape[3])  # type: ignore[attr-defined]


def _dense(problem: Problem, method: Method, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    p, (layers, low) = problem, problem.factors(method)
    out, weights, _ = reference.attend(p.q * p.scale, p.k, p.v, layers, low, p.key_mask, p.causal, method.double_count, p.dropout_p, seed)
    return out, weights


def _linear(problem: Problem, method: Method, seed: Tensor | None, impl: str) -> Tensor:
    """All heads at once, or, where their features would fill the memory, some at a time and again in backward."""
    choice = choose(problem, method, impl)

    def part(p: Problem, start: int, stop: int) -> Tensor:
        low = p.factor(method, {}) if choice.means is None else choice.means
        layers = take_groups(choice.layers, start, stop)
        common = (layers, low, p.key_mask, p.causal, method.double_count)
        if choice.isa:
            return op.attend(p.query, p.key, p.value, *common, isa=choice.isa, scale=p.scale).flatten(0, 1)
        return op.attend(p.q * p.scale, p.k, p.v, *common, p.dropout_p, seed, start)

    def some(q: Tensor, k: Tensor, v: Tensor, start: int, stop: int) -> Tensor:
        return part(problem.groups(start, stop, q, k, v), start, stop)

    groups, n, m, _ = problem.sizes
    width = width_of(problem, method)
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (problem.query, problem.key, problem.value))
    limit = FEATURES_AT_ONCE if learns or choice.isa else FEATURES_IN_CACHE
    step = max(1, limit // max(1, (n + m) * width))
    if step >= groups or torch.compiler.is_compiling():
        return part(problem, 0, groups)
    cuts = [(a, min(a + step, groups)) for a in range(0, groups, step)]
    args = [(*(t[a:b] for t in (problem.q, problem.k, problem.v)), a, b) for a, b in cuts]
    return torch.cat([checkpoint(some, *arg, use_reentrant=False, preserve_rng_state=False) for arg in args])


def check_impl(impl: str, return_weights: bool) -> None:
    known = impl in IMPLEMENTATIONS or impl in NATIVE
    require(known, "impl", f"be one of {', '.join(IMPLEMENTATIONS)}", impl, "use impl='auto'")
    dense = impl == "reference" or not return_weights
    require(dense, "return_weights", "come with impl='reference'", f"impl={impl!r}", "weights are N x M, which only the reference holds")


def draw_seed(problem: Problem) -> Tensor | None:
    if problem.dropout_p == 0:
        return None
    return torch.randint(2**31, (), device=problem.query.device)
