"""What a support returns: a few structured kinds of layer, never an N x M mask.

A layer covers each (query, key) pair at most once. A selection is a tuple of layers; a pair belongs to the
first layer that holds it, so overlaps count once. G is batch x heads; a leading 1 means "the same for all".
Indices below zero mean "none".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Band:
    """j - i = dilation * t with lo <= t <= hi; None is unbounded."""

    lo: int | None
    hi: int | None
    dilation: int = 1


@dataclass(frozen=True)
class Blocks:
    """Query block i // q_block sees the key blocks index[g, i // q_block] of k_block keys each; index (G|1, Q, C)."""

    index: Tensor
    q_block: int
    k_block: int


@dataclass(frozen=True)
class Rows:
    """The queries in index (G|1, r) see every key."""

    index: Tensor


@dataclass(frozen=True)
class Buckets:
    """Pair (i, j) iff k_label[j] is one of q_label[i]; q_label (G, N, T) distinct, k_label (G, M)."""

    q_label: Tensor
    k_label: Tensor


@dataclass(frozen=True)
class Groups:
    """Pair (i, j) iff some t holds i in q_index[t] and j in k_index[t]; (G, T, bq) and (G, T, bk)."""

    q_index: Tensor
    k_index: Tensor


@dataclass(frozen=True)
class Routes:
    """Buckets whose query labels are yet to be found: each query's best of `nodes` clusters k_label (G, M), at most
    `top` and about `keys` keys of them; with `chunk`, those of earlier chunks. Only for an engine that finds them.

    Keys may weigh exp(offset (G, M)). With `worth` (G, nodes) and `least` (G, N) all those are taken, at most `top`, whose share of
    the query's weight has log share + worth >= least."""

    k_label: Tensor
    nodes: int
    top: int
    keys: int | None
    chunk: int
    offset: Tensor | None = None
    worth: Tensor | None = None
    least: Tensor | None = None


Layer = Band | Blocks | Rows | Buckets | Groups | Routes
KINDS: dict[str, type[Any]] = {c.__name__: c for c in (Band, Blocks, Rows, Buckets, Groups, Routes)}


def pack(layers: Sequence[Layer]) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """Split into JSON-able parts and tensors, for an operator's signature."""
    meta: list[dict[str, Any]] = []
    tensors: list[Tensor] = []
    for layer in layers:
        fields: dict[str, Any] = {}
        for f in dataclasses.fields(layer):
            value = getattr(layer, f.name)
            if isinstance(value, Tensor):
                fields[f.name] = {"tensor": len(tensors)}
                tensors.append(value)
            else:
                fields[f.name] = value
        meta.append({"kind": type(layer).__name__, **fields})
    return meta, tensors


def unpack(meta: Sequence[dict[str, Any]], tensors: Sequence[Tensor]) -> tuple[Layer, ...]:
    layers = []
    for entry in meta:
        fields = {k: tensors[v["tensor"]] if isinstance(v, dict) else v for k, v in entry.items() if k != "kind"}
        layers.append(KINDS[entry["kind"]](**fields))
    return tuple(layers)


def take_groups(layers: Sequence[Layer], start: int, stop: int) -> tuple[Layer, ...]:
    """The same layers for groups start..stop."""
    out = []
    for layer in layers:
        cut: dict[str, Any] = {}
        for f in dataclasses.fields(layer):
            t = getattr(layer, f.name)
            if isinstance(t, Tensor) and t.shape[0] != 1:
                cut[f.name] = t[start:stop]
        out.append(dataclasses.replace(layer, **cut))
    return tuple(out)
