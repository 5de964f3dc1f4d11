"""The custom operators: opaque to autograd and the compiler, recomputing in backward."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from ..lowrank import Features, LowRank, Means
from ..partial import finite
from ..selection import Layer, pack, unpack
from .native import engine as native
from .torch.engine import Call, Saved, run_backward, run_forward


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layers: tuple[Layer, ...],
    low_rank: LowRank | None,
    key_mask: Tensor | None,
    causal: bool,
    double_count: bool = False,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    first_group: int = 0,
    isa: str = "",
    scale: float = 1.0,
) -> Tensor:
    """Same arguments as the reference; q is scaled. Differentiable in q, k, v and the features.

    `first_group` numbers these heads among all, for dropout. With an `isa` the native engine runs: q, k, v are then
    four-dimensional, as the caller holds them, and q is not scaled but `scale` is given.
    """
    meta, tensors = pack(layers)
    spec: dict[str, Any] = {"layers": meta, "causal": causal, "double_count": double_count, "dropout_p": dropout_p, "first_group": first_group}
    spec |= {"isa": isa, "scale": scale}
    phi = psi = sign_phi = sign_psi = None
    if isinstance(low_rank, Features):
        phi, psi, sign_phi, sign_psi = low_rank.log_phi, low_rank.log_psi, low_rank.sign_phi, low_rank.sign_psi
        psi = psi.expand(phi.shape[0], -1, -1)
    elif isinstance(low_rank, Means):
        spec["means"] = {n: getattr(low_rank, n) for n in ("nodes", "order", "chunk", "inner")}
        given = [name for name in ("node", "offset", "offset_in") if getattr(low_rank, name) is not None]
        spec["means"]["given"] = given
        tensors += [getattr(low_rank, name) for name in given]
    return attention_op(q, k, v, phi, psi, sign_phi, sign_psi, key_mask, seed, tensors, encode(spec))[0]


def encode(value: Any) -> str:
    """JSON of dicts, lists, strings and numbers, in operations that torch.compile can trace."""
    if isinstance(value, dict):
        return "{" + ",".join([f'"{k}":{encode(v)}' for k, v in value.items()]) + "}"
    if isinstance(value, list):
        return "[" + ",".join([encode(v) for v in value]) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else f'"{value}"' if isinstance(value, str) else repr(value)


def row_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layers: tuple[Layer, ...],
    low_rank: LowRank | None,
    key_mask: Tensor | None,
    causal: bool,
) -> Tensor:
    """(G, N) sum_j w_ij, no gradient."""
    _, log_scale, denominator, _ = run_forward(Call(q, k, v, layers, low_rank, key_mask, causal, False, 0.0, None))
    return denominator * torch.exp(finite(log_scale))


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi: Tensor | None,
    psi: Tensor | None,
    sign_phi: Tensor | None,
    sign_psi: Tensor | None,
    key_mask: Tensor | None,
    seed: Tensor | None,
    tensors: list[Tensor],
    spec: str,
) -> Call | native.NativeCall:
    s = json.loads(spec)
    low: LowRank | None = None
    if phi is not None and psi is not None:
        low = Features(phi, psi, sign_phi, sign_psi)
    elif "means" in s:
        given = s["means"].pop("given")
        low = Means(**dict(zip(given, tensors[-len(given) :], strict=True)), **s["means"])
    layers = unpack(s["layers"], tensors)
    if s["isa"]:
        return native.NativeCall(q, k, v, layers, low, key_mask, s["causal"], s["double_count"], s["scale"], s["isa"])
    return Call(q, k, v, layers, low, key_mask, s["causal"], s["double_count"], s["dropout_p"], seed, s["first_group"])


@torch.library.custom_op("scatterbrain::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi: Tensor | None,
    psi: Tensor | None,
    sign_phi: Tensor | None,
    sign_psi: Tensor | None,
    key_mask: Tensor | None,
    seed: Tensor | None,
    tensors: list[Tensor],
    spec: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = _call(q, k, v, phi, psi, sign_phi, sign_psi, key_mask, seed, tensors, spec)
    return run_forward(call) if isinstance(call, Call) else native.run_forward(call)


@attention_op.register_fake
def _(q, k, v, phi, psi, sign_phi, sign_psi, key_mask, seed, tensors, spec):  # type: ignore[no-untyped-def]
    rows = q.shape[:-1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    sums = (q.new_empty(rows, dtype=wide) for _ in range(2))
    return v.new_empty(*rows, v.shape[-1]), *sums, q.new_empty(rows, dtype=torch.bool)


@torch.library.custom_op("scatterbrain::attention_backward", mutates_args=())
def backward_op(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi: Tensor | None,
    psi: Tensor | None,
    sign_phi: Tensor | None,
    sign_psi: Tensor | None,
    key_mask: Tensor | None,
    seed: Tensor | None,
    tensors: list[Tensor],
    spec: str,
    out: Tensor,
    log_scale: Tensor,
    denominator: Tensor,
    dense: Tensor,
) -> list[Tensor]:
    call = _call(q, k, v, phi, psi, sign_phi, sign_psi, key_mask, seed, tensors, spec)
    if not isinstance(call, Call):
        return native.run_backward(call, d_out, out, log_scale, denominator, dense)
    grads = run_backward(call, d_out, Saved(out, log_scale, denominator, dense))
    return [g.contiguous() for g in grads if g is not None]


@backward_op.register_fake
def _(d_out, q, k, v, phi, psi, *rest):  # type: ignore[no-untyped-def]
    # contiguous, whatever the inputs' strides: a compiled graph takes this at its word
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v, phi, psi) if t is not None]


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, phi, psi, sign_phi, sign_psi, key_mask, seed, tensors, spec = inputs
    ctx.save_for_backward(q, k, v, phi, psi, sign_phi, sign_psi, key_mask, seed, *output, *tensors)
    ctx.spec = spec
    ctx.tensors = len(tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx, d_out, *unused):  # type: ignore[no-untyped-def]
    none = [None] * 3
    if d_out is None:
        return (*none, *none, *none, [None] * ctx.tensors, None)
    saved = ctx.saved_tensors  # once: checkpointing unpacks on reading
    inputs, outputs, tensors = saved[:9], saved[9:13], list(saved[13:])
    grads = backward_op(d_out, *inputs, tensors, ctx.spec, *outputs)
    features = grads[3:] if len(grads) > 3 else [None, None]
    return (*grads[:3], *features, None, None, None, None, [None] * ctx.tensors, None)


attention_op.register_autograd(_backward, setup_context=_setup)
