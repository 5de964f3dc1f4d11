"""Arguments checked and brought to one form: what every implementation is given."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import presets
from .config import LowRankMap, Sampled, Support
from .context import Context
from .errors import require
from .lowrank import LowRank
from .selection import Layer

if TYPE_CHECKING:
    from .impl.native import Engine

DEFAULT: Any = "default"
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Method:
    """What to compute: both parts sampled, or None."""

    support: Sampled | None
    low_rank: Sampled | None
    double_count: bool

    def entries(self, n: int, m: int, dim: int, causal: bool) -> float:
        parts = [p.config.entries(n, m, dim, causal) for p in (self.support, self.low_rank) if p is not None]  # type: ignore[attr-defined]
        return sum(parts)


@dataclass(frozen=True)
class Problem:
    """query (B, H, N, D), key (B, H', M, D), value (B, H', M, E) as they came; q (G, N, D), k (G, M, D), v (G, M, E), with
    G = batch x heads, in the compute dtype, made when first asked for; q not yet scaled."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None
    causal: bool
    scale: float
    dropout_p: float
    out_dtype: torch.dtype
    flat: dict[str, Tensor] = field(default_factory=dict)
    learns: bool = field(default_factory=torch.is_grad_enabled)  # a selection, which has no gradient, may ask first

    @property
    def sizes(self) -> tuple[int, int, int, torch.device]:
        """Groups, queries, keys, device."""
        b, h, n, _ = self.query.shape
        return b * h, n, self.key.shape[2], self.query.device

    @property
    def q(self) -> Tensor:
        return self._flat("q", self.query)

    @property
    def k(self) -> Tensor:
        return self._flat("k", self.key)

    @property
    def v(self) -> Tensor:
        return self._flat("v", self.value)

    def _flat(self, name: str, t: Tensor) -> Tensor:
        if name not in self.flat:
            with torch.set_grad_enabled(self.learns):
                self.flat[name] = self._flatten(t, name != "q")
        return self.flat[name]

    def _flatten(self, t: Tensor, masked: bool) -> Tensor:
        compute = torch.float64 if t.dtype == torch.float64 else torch.float32
        if t.shape[1] != self.query.shape[1]:
            t = t.repeat_interleave(self.query.shape[1] // t.shape[1], 1)
        t = t.to(compute).reshape(t.shape[0] * t.shape[1], t.shape[2], t.shape[3])
        if masked and self.key_mask is not None:  # whatever padding holds, NaN included, must not reach a sum
            t = t.masked_fill(~self.key_mask[..., None], 0.0)
        return t

    def select(self, method: Method, memo: dict[Any, Any], engine: Engine | None = None, lazy: bool = False) -> tuple[Layer, ...]:
        """The support on this input; no gradient."""
        if method.support is None:
            return ()
        ctx = self.context(memo, engine, lazy)
        with torch.no_grad():
            return method.support.config.select(ctx, method.support.state)  # type: ignore[attr-defined]

    def factor(self, method: Method, memo: dict[Any, Any], engine: Engine | None = None) -> LowRank | None:
        """The low-rank part on this input; differentiable."""
        if method.low_rank is None:
            return None
        ctx = self.context(memo, engine, True, gradient=True)
        return method.low_rank.config.factor(ctx, method.low_rank.state)  # type: ignore[attr-defined]

    def context(self, memo: dict[Any, Any], engine: Engine | None, lazy: bool, gradient: bool = False) -> Context:
        def make(name: str) -> Any:
            return lambda: getattr(self, name) if gradient else getattr(self, name).detach()

        more: dict[str, Any] = {"sizes": self.sizes, "heads": self.query.shape[1], "engine": engine, "lazy": lazy}
        return Context(make("q"), make("k"), self.scale, self.causal, self.key_mask, memo, **more)

    def factors(self, method: Method, engine: Engine | None = None) -> tuple[tuple[Layer, ...], LowRank | None]:
        memo: dict[Any, Any] = {}
        return self.select(method, memo, engine), self.factor(method, memo, engine)

    def groups(self, start: int, stop: int, q: Tensor, k: Tensor, v: Tensor) -> Problem:
        """Some heads of it, given their q, k and v."""
        mask = None if self.key_mask is None else self.key_mask[start:stop]
        return dataclasses.replace(self, query=q[None], key=k[None], value=v[None], key_mask=mask, flat={"q": q, "k": k, "v": v})


def check_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Problem:
    for name, t in (("query", query), ("key", key), ("value", value)):
        require(isinstance(t, Tensor), name, "be a tensor", type(t).__name__, "pass a torch.Tensor")
        require(t.dim() == 4, name, "have 4 dimensions (batch, heads, length, width)", f"shape {tuple(t.shape)}", "reshape it")
        require(t.dtype in DTYPES, name, "be float16, bfloat16, float32 or float64", t.dtype, "cast it")
        require(t.device == query.device, name, f"be on query's device {query.device}", t.device, f"move it with {name}.to(query.device)")
        autocast = torch.is_autocast_enabled(query.device.type)
        require(t.dtype == query.dtype or autocast, name, f"have query's dtype {query.dtype}", t.dtype, f"cast it with {name}.to(query.dtype)")
    (b, h, n, d), m = query.shape, key.shape[2]
    require(d > 0, "query", "have width at least 1", f"shape {tuple(query.shape)}", "pass wider heads")
    require(key.shape[3] == d, "key", f"have query's width {d}", key.shape[3], "project queries and keys to one width")
    require(key.shape[0] == b and value.shape[0] == b, "key and value", f"have query's batch size {b}", (key.shape[0], value.shape[0]), "expand them")
    require(value.shape[2] == m, "value", f"have key's length {m}", value.shape[2], "pass one value a key")
    require(value.shape[1] == key.shape[1], "value", f"have key's {key.shape[1]} heads", value.shape[1], "pass as many")
    _check_heads(key.shape[1], h, enable_gqa)
    numeric = isinstance(dropout_p, (int, float)) and not isinstance(dropout_p, bool)
    require(numeric and 0 <= dropout_p <= 1, "dropout_p", "lie in [0, 1]", dropout_p, "pass 0.0 for none")
    if scale is None:
        scale = 1 / math.sqrt(d)
    require(isinstance(scale, (int, float)) and math.isfinite(scale), "scale", "be a finite number", scale, "leave it out for 1/sqrt(width)")
    out_dtype = query.dtype
    if torch.is_autocast_enabled(query.device.type) and query.dtype != torch.float64:
        out_dtype = torch.get_autocast_dtype(query.device.type)
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    if not query.dtype == key.dtype == value.dtype:
        query, key, value = (t.to(compute) for t in (query, key, value))
    mask = None if attn_mask is None else key_mask(attn_mask, b, h, n, m, query.device)
    return Problem(query, key, value, mask, bool(is_causal), float(scale), float(dropout_p), out_dtype)


def _check_heads(kv: int, heads: int, enable_gqa: bool) -> None:
    if kv == heads:
        return
    require(enable_gqa, "key", f"have query's {heads} heads", kv, "pass enable_gqa=True to share each key head among several query heads")
    require(kv > 0 and heads % kv == 0, "key", f"have a number of heads that divides query's {heads}", kv, "pass a divisor")


def key_mask(mask: Tensor, b: int, h: int, n: int, m: int, device: torch.device) -> Tensor:
    """(B * H, M) bool from a mask that says the same to every query. Others are refused: no linear method can honour them."""
    name = "attn_mask"
    require(isinstance(mask, Tensor), name, "be a tensor", type(mask).__name__, "pass a torch.Tensor or None")
    require(mask.device == device, name, f"be on query's device {device}", mask.device, "move it with attn_mask.to(query.device)")
    full = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    fits = len(full) == 4 and all(s in (1, t) for s, t in zip(full, (b, h, n, m), strict=True))
    require(fits, name, f"broadcast to (batch, heads, queries, keys) = {(b, h, n, m)}", tuple(mask.shape), "pass (batch, 1, 1, keys)")
    compiling = torch.compiler.is_compiling()
    mask = mask.reshape(full)
    remedy = "pass a key padding mask (batch, 1, 1, keys), and is_causal=True for causal attention"
    if mask.shape[2] > 1:
        require(not compiling, name, "be (batch, 1, 1, keys) under torch.compile", tuple(mask.shape), remedy)
        same = bool((mask == mask[:, :, :1]).all())
        require(same, name, "hide the same keys from every query", f"a mask {tuple(mask.shape)} whose rows differ", remedy)
        mask = mask[:, :, :1]
    if mask.dtype != torch.bool:
        ok = mask.is_floating_point() and not compiling
        require(ok, name, "be bool, or float outside torch.compile", mask.dtype, "pass a bool mask, True where the key is visible")
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        plain = bool((hidden | (mask == 0)).all())
        require(plain, name, "hold 0 for visible and -inf for hidden keys", "other biases", "pass a bool mask; additive biases are not supported")
        mask = ~hidden
    return mask[:, :, 0].expand(b, h, m).reshape(b * h, m).contiguous()


def check_method(support: Any, low_rank: Any, budget: float | None, double_count: bool, causal: bool) -> None:
    """All that can be said of a method before any tensor comes."""
    given = [name for name, part in (("support", support), ("low_rank", low_rank)) if not is_default(part)]
    if budget is not None:
        ok = isinstance(budget, (int, float)) and not isinstance(budget, bool) and 0 < budget <= 1
        require(ok, "budget", "lie in (0, 1]", budget, "pass the share of entries to spend, such as 1/8")
        require(not given, "budget", "be left out when support or low_rank is given", f"budget={budget} and {given}", "size the parts instead")
    parts = [part for part in (support, low_rank) if part is not None and not is_default(part)]
    something = parts or not given
    require(something, "support and low_rank", "not both be None", "None and None", "pass one of them, or neither for the default")
    both = len(parts) == 2
    require(both or not double_count, "double_count", "come with a support and a low-rank map, both given", "fewer", "pass both, or leave it out")
    _check_part(support, "support", Support, "a support, such as Window(128)", causal)
    _check_part(low_rank, "low_rank", LowRankMap, "a map, such as Performer(128)", causal)


def _check_part(part: Any, name: str, kind: type, example: str, causal: bool) -> None:
    if part is None or is_default(part):
        return
    config = part.config if isinstance(part, Sampled) else part
    require(isinstance(config, kind), name, f"be a {kind.__name__}, a sampled one, or None", config, f"pass {example}, or None")
    refusal = config.causal_refusal()
    require(not (causal and refusal), name, "be able to honour is_causal=True", type(config).__name__, refusal)


def resolve(support: Any, low_rank: Any, budget: float | None, double_count: bool, problem: Problem) -> Method:
    """Fill in what the caller left out, refuse what does not fit, draw what is random."""
    check_method(support, low_rank, budget, double_count, problem.causal)
    if is_default(support) and is_default(low_rank):
        method = default_for(problem, 1 / 8 if budget is None else budget)
        support, low_rank = method["support"], method["low_rank"]
    return Method(_sampled(support, problem.query), _sampled(low_rank, problem.query), double_count)


def default_for(problem: Problem, budget: float) -> presets.Method:
    """The default at a budget: a share of the keys that can be seen, so that padding changes nothing."""
    length = max(1, problem.key.shape[2])
    if problem.key_mask is not None and not torch.compiler.is_compiling():
        length = max(1, int(problem.key_mask.sum(-1).max()))
    seen = (length + 1) // 2 if problem.causal else length
    if budget >= 1:
        return presets.softmax()
    return presets.default(max(1, round(budget * seen)), length=length, causal=problem.causal)


def is_default(part: Any) -> bool:
    return isinstance(part, str) and part == DEFAULT


def _sampled(part: Any, like: Tensor) -> Sampled | None:
    if part is None or is_default(part):
        return None
    sampled = part if isinstance(part, Sampled) else part.sample(like.shape[3])
    return sampled.to(like.device, torch.float64 if like.dtype == torch.float64 else torch.float32)
