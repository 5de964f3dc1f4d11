"""What the benchmark compares: exact attention and ours, by name. Other packages: lab/packages.py."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import scatterbrain as sb

from ..config import Config, Support

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
Method = dict[str, Any]
ENTRIES = {512: 64, 1024: 128, 2048: 256, 4096: 512, 8192: 512, 16384: 576, 32768: 704, 131072: 1024}


def entries_for(length: int) -> int:
    """Entries a query row may spend where it sees all keys: an eighth up to 4,096, then as many as the longest listed length below."""
    return max(1, length // 8) if length < 4096 else ENTRIES[max(n for n in ENTRIES if n <= length)]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What an attention is built for. `share` is the budget given to the default; see `settle`."""

    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    length: int
    width: int = 64
    causal: bool = False
    scale: float
    dtype: str = "float32"
    impl: str = "auto"
    seed: int = 0
    share: float | None = None

    @property
    def visible(self) -> float:
        """Keys that a query sees, mean over queries."""
        return (self.length + 1) / 2 if self.causal else self.length

    @property
    def entries(self) -> int:
        """For every method alike: causal, the mean row sees half of the keys and may spend half of the entries."""
        return max(1, round(entries_for(self.length) * self.visible / self.length))

    def at(self, length: int) -> Shape:
        return dataclasses.replace(self, length=length, share=None if length != self.length else self.share)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One line of the table.

    `growth` is the power of the length that its time grows with. `build` makes the attention that is timed; `bytes` says
    what it needs where that is known beforehand; `definition` is a dense one to compare with, `refuses` why a shape is left out.
    """

    name: str
    label: str
    kind: str
    build: Callable[[Shape], Forward]
    growth: int = 1
    note: str = ""
    method: Callable[[Shape], Method] | None = None
    bytes: Callable[[Shape, bool], int] | None = None
    definition: Callable[[Shape], Forward] | None = None
    entries: Callable[[Shape], float] = lambda shape: shape.visible
    refuses: Callable[[Shape], str] = lambda shape: ""
    module: str = ""
    compared: bool = True

    def feed(self, shape: Shape, *tensors: Tensor) -> tuple[Tensor, ...]:
        """q, k, v as it takes them. Other packages fix the scale and the number of key heads, so these move into the inputs, before any clock."""
        if self.kind != "package":
            return tensors
        q, *kv = tensors
        factor = shape.scale * math.sqrt(shape.width)
        return (q if factor == 1 else q * factor, *(t.repeat_interleave(shape.heads // shape.kv_heads, 1) for t in kv))


def dense(shape: Shape) -> Forward:
    """Softmax attention as one writes it, for any number of key heads."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(shape.heads // shape.kv_heads, 1) if t.shape[1] != shape.heads else t for t in (k, v))
        logits = q @ k.mT * shape.scale
        if shape.causal:
            logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        return torch.softmax(logits, -1) @ v

    return forward


def dense_bytes(shape: Shape, backward: bool) -> int:
    """Logits, their copies and the weights; measured, these are the matrices that live at once."""
    matrix = shape.batch * shape.heads * shape.length**2 * torch.finfo(getattr(torch, shape.dtype)).bits // 8
    return matrix * (3 + shape.causal + backward)


def fused(shape: Shape) -> Forward:
    more: dict[str, Any] = {"is_causal": shape.causal, "scale": shape.scale, "enable_gqa": shape.heads != shape.kv_heads}
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **more)


EXACT = (
    Contender(name="sdpa", label="softmax, fused (SDPA)", kind="exact", build=fused, growth=2),
    Contender(name="naive", label="softmax, naive", kind="exact", build=dense, growth=2, bytes=dense_bytes),
)


def ours(name: str, label: str, method: Callable[[Shape], Method]) -> Contender:
    return Contender(
        name=name, label=label, kind="ours", build=lambda s: attend(s, method(s)), method=method, refuses=lambda s: refusal(s, method(s))
    )


def attend(shape: Shape, method: Method, impl: str | None = None) -> Forward:
    more: dict[str, Any] = {"is_causal": shape.causal, "scale": shape.scale, "enable_gqa": shape.heads != shape.kv_heads}
    return lambda q, k, v: sb.attention(q, k, v, **more, impl=impl or shape.impl, **method)


def refusal(shape: Shape, method: Method) -> str:
    """Why the library would not run it causally."""
    parts = [part for part in method.values() if isinstance(part, Config)]
    said = [part.causal_refusal() for part in parts] if shape.causal else []
    return next((f"cannot be causal: {text}" for text in said if text), "")


def default(shape: Shape) -> Method:
    share = shape.share if shape.share is not None else shape.entries / shape.visible
    return {"budget": min(1.0, share)}


def selected(shape: Shape) -> Method:
    """The default's support alone, grown to what the default spends with its means."""
    grown = float(shape.entries)
    for _ in range(4):
        support = sb.presets.default(round(grown), length=shape.length, causal=shape.causal)["support"]
        grown = min(grown * shape.entries / support.entries(shape.length, shape.length, shape.width, shape.causal), shape.length - 1)
    return {"support": support, "low_rank": None}


def means(shape: Shape) -> Method:
    if not shape.causal:
        return {"support": None, "low_rank": sb.ClusterMeans(shape.entries)}
    chunk, inner = 256, 16
    near = sb.ClusterMeans(1, chunk=chunk, per_chunk=1, inner=inner).entries(shape.length, shape.length, shape.width, True)
    per_chunk = round((shape.entries - near) * 2 * chunk / max(chunk, shape.length - chunk))
    return {"support": None, "low_rank": sb.ClusterMeans(1, chunk=chunk, per_chunk=min(chunk, max(1, per_chunk)), inner=inner)}


def hashed(shape: Shape, sparse: str) -> int:
    """What to ask of a scheme: causal LSH looks back among a bucket's earlier members only, and spends half of what it is given."""
    return shape.entries * (2 if shape.causal and sparse == "reformer" else 1)


def pair(sparse: str) -> Callable[[Shape], Method]:
    def method(shape: Shape) -> Method:
        support = sb.presets.scatterbrain(hashed(shape, sparse), sparse=sparse, seed=shape.seed)["support"]
        return {"support": support, "low_rank": sb.presets.scatterbrain(shape.entries, seed=shape.seed)["low_rank"]}

    return method


def cross_polytope(shape: Shape) -> Method:
    """3:1 as the other pairs. One bucket of 2 d holds few of many keys, so there are rounds enough to spend the entries."""
    exact = round(0.75 * shape.entries)
    rounds = max(1, round(exact * 2 * shape.width / shape.visible))
    support: Support = sb.LSH(rounds, bucket=max(1, exact // rounds), scheme="cross_polytope", seed=shape.seed)
    return {"support": support, "low_rank": sb.presets.performer(max(2, shape.entries - exact), seed=shape.seed)["low_rank"]}


OURS = (
    ours("default", "Scatterbrain, the default", default),
    ours("smyrf+performer", "SMYRF + Performer, as published", pair("smyrf")),
    ours("reformer+performer", "Reformer + Performer", pair("reformer")),
    ours("window+performer", "window + Performer", pair("local")),
    ours("crosspolytope+performer", "cross-polytope LSH + Performer", cross_polytope),
    ours("support", "columns + window + routed, no means", selected),
    ours("means", "cluster means alone", means),
    ours("smyrf", "SMYRF alone", lambda s: sb.presets.smyrf(s.entries, rounds=1, seed=s.seed)),
    ours("reformer", "Reformer alone", lambda s: sb.presets.reformer(hashed(s, "reformer"), seed=s.seed)),
    ours("window", "window alone", lambda s: sb.presets.local(s.entries)),
    ours("performer", "Performer alone", lambda s: sb.presets.performer(s.entries, seed=s.seed)),
)


def settle(contender: Contender, shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> tuple[Shape, sb.Explanation]:
    """What the method spends here, and the default's budget raised until it spends the entries of the table, which are a floor."""
    assert contender.method is not None
    gqa = shape.heads != shape.kv_heads
    for attempt in range(4):
        method = contender.method(shape)
        found = sb.explain(q, k, v, is_causal=shape.causal, scale=shape.scale, enable_gqa=gqa, impl=shape.impl, **method)
        spent = found.entries_sparse + found.entries_low_rank
        if contender.name != "default" or spent >= shape.entries or method["budget"] >= 1 or attempt == 3:
            break
        shape = dataclasses.replace(shape, share=method["budget"] * 1.01 * shape.entries / spent)
    return shape, found
