"""Calls of the native engine: what it covers, and tensors lent to it for the time of a call."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...lowrank import Features, LowRank, Means
from ...selection import Band, Blocks, Buckets, Groups, Layer, Routes, Rows
from . import library, lost
from .library import DTYPES, KINDS, UNBOUNDED, array, pointer

if TYPE_CHECKING:
    from ...context import Context

WIDEST_HEAD = 256


@dataclass(frozen=True)
class NativeCall:
    """q (B, H, N, D), k (B, H', M, D), v (B, H', M, E), not scaled, as the caller holds them; key_mask (B * H, M)."""

    q: Tensor
    k: Tensor
    v: Tensor
    layers: tuple[Layer, ...]
    low_rank: LowRank | None
    key_mask: Tensor | None
    causal: bool
    double_count: bool
    scale: float
    isa: str


def absent() -> str:
    """Why there is no native engine here; empty where there is."""
    if library.isas():
        return ""
    return "the native engine was not built: install a C++17 compiler (such as g++), then pip install --force-reinstall --no-deps scatterbrain"


def refusal(query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> str:
    """Why these tensors are not for the native engine, whatever the method."""
    if query.device.type != "cpu":
        return f"the native engine runs on CPUs, and the tensors are on {query.device}"
    wide = [t.dtype for t in (query, key, value) if t.dtype not in DTYPES]
    if wide:
        return f"the native engine computes in float32, and the tensors are {wide[0]}"
    if max(query.shape[3], value.shape[3]) > WIDEST_HEAD:
        return f"the native engine takes heads up to {WIDEST_HEAD} wide"
    if dropout_p > 0:
        return "the native engine has no dropout"
    return absent()


def method_refusal(layers: tuple[Layer, ...], means: Means | None, features: bool, signed: bool, double_count: bool) -> str:
    """Why this selection and this low-rank part are not for the native engine; empty where they are."""
    routes, buckets = [x for x in layers if isinstance(x, Routes)], [x for x in layers if isinstance(x, Buckets)]
    if any(isinstance(x, Groups) for x in layers):
        return "the native engine does not cover Clusters (the Routing Transformer's overlapping groups)"
    if len(routes) > 1 or (routes and buckets):
        return "the native engine covers one routed support, without other buckets"
    if routes and features:
        return "the native engine covers routes alone or over cluster means"
    if signed:
        return "the native engine covers non-negative features only"
    if double_count and (means is not None or any(isinstance(x, Rows) for x in layers)):
        return "the native engine counts twice only features, over supports without global rows"
    if means is not None and means.order != 1:
        return "the native engine covers cluster means of first order only"
    if means is not None and (buckets or not all(x.k_label is means.node and x.offset is means.offset for x in routes)):
        return "over cluster means the native engine covers windows, blocks, columns, and routes to the same clusters"
    return ""


class Engine:
    """Selection done natively, for `Context.engine`."""

    def __init__(self, isa: str, query: Tensor, key: Tensor, scale: float):
        self.isa, self.query, self.key, self.scale = isa, query.detach(), key.detach(), scale

    @property
    def rep(self) -> int:
        return self.query.shape[1] // self.key.shape[1]

    def cluster(self, ctx: Context, clusters: int, iterations: int, chunk: int = 0, rows: Tensor | None = None) -> Tensor:
        """Labels (G, M): k-means over the visible keys, or inside each chunk of them; or over `rows` (G, M, D) in their place."""
        key, mask = self.key, ctx.key_mask
        if rows is not None:
            key = rows.unflatten(0, self.query.shape[:2])
        elif mask is not None and self.rep > 1:
            key = key.repeat_interleave(self.rep, 1)  # heads that share keys may hide different ones
        label = cluster_op(key, mask, clusters, iterations, chunk, self.isa)
        return label if label.shape[0] == ctx.groups else label.view(key.shape[0], -1, ctx.m).repeat_interleave(self.rep, 1).flatten(0, 1)

    def columns(self, ctx: Context, rows: Tensor, past: int, fixed: list[int], heavy: int) -> Tensor:
        """rows (G | 1, blocks, r) sampled queries -> (G, blocks, heavy) columns."""
        return columns_op(self.query, self.key, ctx.key_mask, rows, past, fixed, heavy, ctx.causal, self.scale, self.isa)

    def routes(self, ctx: Context, layer: Routes) -> Buckets:
        """The labels that the attention itself would find."""
        numbers = [layer.nodes, layer.top, -1 if layer.keys is None else layer.keys, layer.chunk]
        fitted = [layer.offset, layer.worth, layer.least]
        label = routes_op(self.query, self.key, ctx.key_mask, layer.k_label, numbers, ctx.causal, self.scale, self.isa, *fitted)
        return Buckets(label, layer.k_label)


def _struct(q: Tensor, k: Tensor, v: Tensor | None, key_mask: Tensor | None, causal: bool, scale: float) -> library.Call:
    call = library.Call(batch=q.shape[0], heads=q.shape[1], rep=q.shape[1] // k.shape[1], n=q.shape[2], m=k.shape[2], d=q.shape[3])
    call.e = k.shape[3] if v is None else v.shape[3]
    call.q, call.k, call.v = array(q), array(k), array(k if v is None else v)
    call.key_mask, call.causal, call.scale = pointer(key_mask), causal, scale
    call.threads = library.threads()
    return call


def _layer(x: Layer, keep: list[Tensor]) -> library.Layer:
    def lend(t: Tensor) -> Tensor:
        keep.append(t.contiguous())
        return keep[-1]

    out = library.Layer(kind=KINDS[type(x).__name__], dilation=1)
    match x:
        case Band():
            out.lo, out.hi, out.dilation = (-UNBOUNDED if x.lo is None else x.lo), (UNBOUNDED if x.hi is None else x.hi), x.dilation
        case Blocks():
            index = lend(x.index)
            out.index, out.groups, out.outer, out.inner = pointer(index), *index.shape
            out.q_block, out.k_block = x.q_block, x.k_block
        case Rows():
            index = lend(x.index)
            out.index, out.groups, out.inner = pointer(index), *index.shape
        case Buckets():
            q, k = lend(x.q_label), lend(x.k_label)
            out.q_label, out.k_label, out.q_groups, out.k_groups, out.visits = pointer(q), pointer(k), q.shape[0], k.shape[0], q.shape[2]
        case Routes():
            k = lend(x.k_label)
            out.k_label, out.k_groups, out.nodes, out.top = pointer(k), k.shape[0], x.nodes, x.top
            out.keys, out.chunk = -1 if x.keys is None else x.keys, x.chunk
            out.offset, out.worth, out.least = (pointer(None if t is None else lend(t)) for t in (x.offset, x.worth, x.least))
    return out


def _prepare(call: NativeCall, keep: list[Tensor]) -> library.Call:
    mask = None if call.key_mask is None else call.key_mask.contiguous()
    keep += [] if mask is None else [mask]
    s = _struct(call.q, call.k, call.v, mask, call.causal, call.scale)
    s.double_count = call.double_count
    s.layers_n = len(call.layers)
    layers = [_layer(x, keep) for x in call.layers]
    s.layers = (library.Layer * max(1, len(layers)))(*layers)
    low = call.low_rank
    if isinstance(low, Features):
        phi, psi = low.log_phi.contiguous(), low.log_psi.contiguous()
        keep += [phi, psi]
        s.features, s.log_phi, s.log_psi = phi.shape[-1], pointer(phi), pointer(psi)
    elif isinstance(low, Means):
        node = low.node.contiguous()
        keep.append(node)
        s.node, s.node_groups, s.nodes, s.chunk, s.inner = pointer(node), node.shape[0], low.nodes, low.chunk, low.inner
        offsets = [None if t is None else t.contiguous() for t in (low.offset, low.offset_in)]
        keep += [t for t in offsets if t is not None]
        s.offset, s.offset_in = map(pointer, offsets)
    return s


def run_forward(call: NativeCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out (B, H, N, E); each row's log reference and denominator (B, H, N), and whether it was done densely."""
    (b, h, n, _), e = call.q.shape, call.v.shape[3]
    out = call.v.new_empty(b, h, n, e)
    log_scale, denominator = (torch.empty(b, h, n) for _ in range(2))
    dense = torch.empty(b, h, n, dtype=torch.bool)
    keep: list[Tensor] = []
    s = _prepare(call, keep)
    s.out, s.log_scale, s.denominator, s.lost = array(out), pointer(log_scale), pointer(denominator), pointer(dense)
    library.run(call.isa, "sb_forward", ctypes.byref(s))
    if isinstance(call.low_rank, Features) and bool(dense.any()):
        lost.forward(call, dense, out, log_scale, denominator)
    return out, log_scale, denominator, dense


def run_backward(call: NativeCall, d_out: Tensor, out: Tensor, log_scale: Tensor, denominator: Tensor, dense: Tensor) -> list[Tensor]:
    """Gradients of q, k, v and, for features, log_phi and log_psi."""
    (b, h, n, d), m, e = call.q.shape, call.k.shape[2], call.v.shape[3]
    inverse = torch.where(denominator == 0, 0.0, 1 / torch.where(denominator == 0, 1.0, denominator))
    delta = (d_out.float() * out.float()).sum(-1)
    d_q = torch.empty(b, h, n, d, dtype=call.q.dtype)
    share = h == call.k.shape[1]
    d_k = torch.empty(b, h, m, d, dtype=call.k.dtype if share else torch.float32)
    d_v = torch.empty(b, h, m, e, dtype=call.v.dtype if share else torch.float32)
    keep: list[Tensor] = []
    s = _prepare(call, keep)
    low = call.low_rank
    d_phi = torch.zeros_like(low.log_phi, memory_format=torch.contiguous_format) if isinstance(low, Features) else None
    d_psi = torch.zeros_like(low.log_psi, memory_format=torch.contiguous_format) if isinstance(low, Features) else None
    live = inverse.masked_fill(dense, 0.0)  # rows done densely are left out here
    s.log_scale, s.inverse, s.delta = pointer(log_scale), pointer(live), pointer(delta)
    s.d_out, s.d_q, s.d_k, s.d_v, s.d_phi, s.d_psi = array(d_out), array(d_q), array(d_k), array(d_v), pointer(d_phi), pointer(d_psi)
    library.run(call.isa, "sb_backward", ctypes.byref(s))
    if d_phi is not None and d_psi is not None and bool(dense.any()):
        lost.backward(call, dense, d_out, log_scale, inverse, delta, (d_q, d_k, d_v, d_phi, d_psi))
    if not share:
        d_k, d_v = (t.view(b, -1, h // call.k.shape[1], m, t.shape[3]).sum(2).to(call.k.dtype) for t in (d_k, d_v))
    return [t for t in (d_q, d_k, d_v, d_phi, d_psi) if t is not None]


@torch.library.custom_op("scatterbrain::native_cluster", mutates_args=())
def cluster_op(key: Tensor, mask: Tensor | None, clusters: int, iterations: int, chunk: int, isa: str) -> Tensor:
    b, h, m, d = key.shape
    label = torch.empty(b * h, m, dtype=torch.int64)
    k, mask = array(key), None if mask is None else mask.contiguous()
    sizes = (clusters, iterations, chunk, library.threads())
    library.run(isa, "sb_cluster", ctypes.byref(k), b, h, m, d, pointer(mask), *sizes, pointer(label))
    return label


@torch.library.custom_op("scatterbrain::native_columns", mutates_args=())
def columns_op(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    rows: Tensor,
    past: int,
    fixed: list[int],
    heavy: int,
    causal: bool,
    scale: float,
    isa: str,
) -> Tensor:
    mask, rows = None if mask is None else mask.contiguous(), rows.contiguous()
    call = _struct(query, key, None, mask, causal, scale)
    index = torch.empty(query.shape[0] * query.shape[1], rows.shape[1], heavy, dtype=torch.int64)
    at = torch.tensor(fixed, dtype=torch.int64)
    library.run(isa, "sb_columns", ctypes.byref(call), pointer(rows), *rows.shape, past, pointer(at), len(fixed), heavy, pointer(index))
    return index


@torch.library.custom_op("scatterbrain::native_routes", mutates_args=())
def routes_op(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    k_label: Tensor,
    numbers: list[int],
    causal: bool,
    scale: float,
    isa: str,
    offset: Tensor | None = None,
    worth: Tensor | None = None,
    least: Tensor | None = None,
) -> Tensor:
    nodes, top, keys, chunk = numbers
    keep: list[Tensor] = []
    mask = None if mask is None else mask.contiguous()
    call = _struct(query, key, None, mask, causal, scale)
    layer = _layer(Routes(k_label, nodes, top, None if keys < 0 else keys, chunk, offset, worth, least), keep)
    call.layers_n, call.layers = 1, (library.Layer * 1)(layer)
    label = torch.empty(query.shape[0] * query.shape[1], query.shape[2], top, dtype=torch.int64)
    library.run(isa, "sb_routes", ctypes.byref(call), pointer(label))
    return label


@cluster_op.register_fake
def _(key: Tensor, *rest: Any) -> Tensor:
    return key.new_empty(key.shape[0] * key.shape[1], key.shape[2], dtype=torch.int64)


@columns_op.register_fake
def _(query: Tensor, key: Tensor, mask: Tensor | None, rows: Tensor, past: int, fixed: list[int], heavy: int, *rest: Any) -> Tensor:
    return query.new_empty(query.shape[0] * query.shape[1], rows.shape[1], heavy, dtype=torch.int64)


@routes_op.register_fake
def _(query: Tensor, key: Tensor, mask: Tensor | None, k_label: Tensor, numbers: list[int], *rest: Any) -> Tensor:
    return query.new_empty(query.shape[0] * query.shape[1], query.shape[2], numbers[1], dtype=torch.int64)
