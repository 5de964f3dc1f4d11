"""Known methods by name, each one line: `sb.attention(q, k, v, **sb.presets.reformer(entries=512))`.

`entries` is what a query row may cost (DESIGN's count: a sparse entry 1, m features 2m, m means m); methods are
comparable at equal `entries`. A budget b on M keys is entries = b * M.
"""

from __future__ import annotations

import math
from typing import Any

from .config import LowRankMap, Support
from .errors import require, require_int
from .features import ClusterMeans, EluPlusOne, Linformer, Nystrom, Performer
from .supports import LSH, Clusters, Columns, Fixed, Full, GlobalTokens, RandomBlocks, Routed, Strided, Window

Method = dict[str, Any]


def _method(support: Support | None, low_rank: LowRankMap | None, **more: Any) -> Method:
    return {"support": support, "low_rank": low_rank, **more}


def softmax() -> Method:
    """Exact attention."""
    return _method(Full(), None)


def reformer(entries: int = 256, *, rounds: int = 1, seed: int = 0) -> Method:
    """LSH chunks with one look-back (shared queries and keys in the source; any here)."""
    return _method(LSH(rounds, bucket=_share(entries, 2 * rounds), scheme="reformer", seed=seed), None)


def smyrf(entries: int = 256, *, rounds: int = 2, seed: int = 0) -> Method:
    """Balanced clusters of asymmetric LSH."""
    return _method(LSH(rounds, bucket=_share(entries, rounds), seed=seed), None)


def local(entries: int = 256) -> Method:
    return _method(Window(entries), None)


def sparse_transformer(entries: int = 256, *, pattern: str = "strided", length: int = 4096) -> Method:
    """`length` sets how far the strides reach, since a stride's cost depends on it."""
    require(pattern in ("strided", "fixed"), "pattern", "be 'strided' or 'fixed'", pattern, "pick one of them")
    if pattern == "strided":
        return _method(Strided(_share(entries, 3)), None)
    stride = _share(entries, 2)
    return _method(Fixed(stride, tail=max(1, min(stride, (entries - stride) * stride // max(1, length)))), None)


def performer(entries: int = 256, *, kind: str = "positive", seed: int = 0) -> Method:
    features = _share(entries, 2)
    return _method(None, Performer(features + features % 2, kind=kind, seed=seed))


def linear_transformer() -> Method:
    return _method(None, EluPlusOne())


def linformer(entries: int = 256, *, length: int | None = None, seed: int = 0) -> Method:
    return _method(None, Linformer(_share(entries, 2), length=length, seed=seed))


def nystromformer(entries: int = 256) -> Method:
    return _method(None, Nystrom(_share(entries, 2)))


def longformer(entries: int = 256, *, tokens: int = 4) -> Method:
    """Window and global tokens."""
    return _method(Window(max(1, entries - 2 * tokens)) | GlobalTokens(tokens), None)


def bigbird(entries: int = 256, *, tokens: int = 4, block: int = 64, seed: int = 0) -> Method:
    """Window, random blocks and global tokens."""
    block = min(block, _share(entries, 4))
    blocks = max(1, entries // (2 * block))
    window = max(1, entries - blocks * block - 2 * tokens)
    return _method(Window(window) | RandomBlocks(blocks, block=block, seed=seed) | GlobalTokens(tokens), None)


def long_short(entries: int = 256) -> Method:
    """Window and Linformer."""
    return _method(Window(_share(entries, 2)), Linformer(_share(entries, 4)))


def routing_transformer(entries: int = 256, *, length: int = 4096) -> Method:
    """k-means clusters of `entries` members; as many as it takes to hold `length` tokens once."""
    return _method(Clusters(max(1, length // entries), size=entries), None)


def scatterbrain(
    entries: int = 256, *, sparse: str = "smyrf", rounds: int = 1, sparse_share: float = 0.75, kind: str = "positive", seed: int = 0
) -> Method:
    """The published pairs, LSH + Performer, at 3:1 unless told: sparse is 'smyrf', 'reformer' or 'local'."""
    require(0 < sparse_share < 1, "sparse_share", "lie in (0, 1)", sparse_share, "pass 0.75 for the paper's 3:1")
    exact = max(1, round(entries * sparse_share))
    parts = {"smyrf": smyrf, "reformer": reformer}
    require(sparse in (*parts, "local"), "sparse", "be 'smyrf', 'reformer' or 'local'", sparse, "pick one of them")
    support = local(exact)["support"] if sparse == "local" else parts[sparse](exact, rounds=rounds, seed=seed)["support"]
    return _method(support, performer(max(2, entries - exact), kind=kind, seed=seed)["low_rank"])


def naive_sum(entries: int = 256, *, rounds: int = 1, sparse_share: float = 0.75, seed: int = 0) -> Method:
    """SMYRF + Performer added without correction: counts the support twice. The paper's negative baseline."""
    return {**scatterbrain(entries, rounds=rounds, sparse_share=sparse_share, seed=seed), "double_count": True}


def default(entries: int = 256, *, length: int = 4096, causal: bool = False) -> Method:
    """Columns, window and routed clusters over cluster means (DESIGN, section 4), for about `length` keys.

    Not causal: of `entries`, 0.40 go to means (at most 2 sqrt(length)), 0.06 to columns, 0.12 to the window, the rest to routed clusters.
    (Measured on MiniLM and Whisper: shares within a third of these change the error by less than 0.02.)
    Causal: about 0.17 go to means of past chunks, a few to means nearby; of what is left 0.22 each to columns (4 of
    them sinks) and routed clusters, and the rest to the window (measured on SmolLM2).
    """
    require_int(entries, "entries")
    require_int(length, "length")
    if entries >= length:
        return softmax()
    if entries < 24 and causal:
        return _method(Window(max(1, entries - 8)), ClusterMeans(1, chunk=64, per_chunk=1, inner=8))
    if entries < 8:
        return _method(Window(max(1, entries - 2)), ClusterMeans(max(1, entries // 3)))
    return _default_causal(entries, length) if causal else _default_both_ways(entries, length)


def _default_both_ways(entries: int, length: int) -> Method:
    means, columns, window = (max(1, round(entries * share)) for share in (0.4, 0.06, 0.12))
    means = max(2, min(means, 2 * math.isqrt(length)))  # more would cost more to choose among than they give
    keys = max(1, entries - means - columns - window)
    top = min(means, max(1, -(-2 * keys * means // length)))
    support = Routed(top, clusters=means, keys=keys) | Columns(columns) | Window(window)
    return _method(support, ClusterMeans(means))


def _default_causal(entries: int, length: int) -> Method:
    """`entries` is the mean over rows, of whom the middle one sees half the keys."""
    chunk, inner = (256, 16) if entries >= 96 else (64, 8)
    per_chunk = max(1, min(chunk // 8, round(0.17 * entries * 2 * chunk / max(chunk, length - chunk))))
    means = ClusterMeans(1, chunk=chunk, per_chunk=per_chunk, inner=inner)
    # early rows cannot spend what later ones may, and overlaps count once: a little more evens that out
    left = max(3, round(1.06 * (entries - means.entries(length, length, 1, True))))
    columns = max(1, round(0.2 * left))
    keys = max(round(0.22 * left), min(left // 3, round(0.6 * chunk / per_chunk)))
    window = max(1, left - columns - keys)
    top = max(1, -(-2 * keys * per_chunk // chunk))
    sinks = min(4, columns)
    routed = Routed(top, clusters=max(64, top), keys=keys, chunk=chunk, per_chunk=per_chunk)
    return _method(routed | Columns(columns - sinks, first=sinks) | Window(window), means)


def _share(entries: int, parts: int) -> int:
    require_int(entries, "entries")
    return max(1, entries // parts)


__all__ = [
    "bigbird",
    "default",
    "linear_transformer",
    "linformer",
    "local",
    "long_short",
    "longformer",
    "naive_sum",
    "nystromformer",
    "performer",
    "reformer",
    "routing_transformer",
    "scatterbrain",
    "smyrf",
    "softmax",
    "sparse_transformer",
]
