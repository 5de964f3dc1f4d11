"""Random methods, shapes, strides, masks and dtypes through the native engine, against the dense reference."""

import random
from dataclasses import dataclass

import pytest
import scatterbrain as sb
import torch

from cases import NATIVE, assert_close, assert_rounded_once, normal, run

CASES, BUNDLE = 2400, 40
SIZES = (0, 1, 1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 48, 64, 70, 95, 97, 110)
WIDTHS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 24, 32, 33, 64)
DTYPES = (torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Case:
    seed: int
    impl: str
    batch: int
    heads: int
    kv_heads: int
    n: int
    m: int
    d: int
    e: int
    dtype: torch.dtype
    layouts: list
    mask: str
    causal: bool
    scale: float | None
    size: float
    method: dict


def draw(seed):
    r = random.Random(seed)
    method = _method(r)
    looks_ahead = any(p is not None and p.causal_refusal() for p in method.values())
    kv_heads, rep, n = r.choice((1, 1, 2, 3)), r.choice((1, 1, 2, 3)), r.choice(SIZES)
    return Case(
        seed=seed,
        impl=NATIVE[seed % len(NATIVE)],
        batch=r.choice((0, 1, 1, 1, 2, 3) if r.random() < 0.1 else (1, 1, 2)),
        heads=kv_heads * rep,
        kv_heads=kv_heads,
        n=n,
        m=r.choice((n, n, r.choice(SIZES))),
        d=r.choice(WIDTHS),
        e=r.choice(WIDTHS),
        dtype=r.choice(DTYPES),
        layouts=[r.choice(list(LAYOUTS)) for _ in range(3)],
        mask=r.choice(("none", "none", "keys", "heads", "flat", "tail", "whole rows")),
        causal=not looks_ahead and r.random() < 0.5,
        scale=r.choice((None, None, None, 1.0, 0.3, -0.5, 0.0)),
        size=r.choice((0.1, 1.0, 1.0, 1.0, 3.0, 20.0)),
        method=method,
    )


def _method(r):
    kind = r.choice(("sparse", "sparse", "features", "features", "features", "means", "means"))
    clusters = {"clusters": r.randint(1, 9), "chunk": r.choice((16, 32)), "per_chunk": r.randint(1, 5), "iterations": r.randint(0, 4)}
    routed = sb.Routed(r.randint(1, clusters["clusters"]), keys=r.choice((None, 1, 6, 20)), **clusters)
    if kind == "means":
        low = sb.ClusterMeans(clusters.pop("clusters"), inner=r.choice((1, 4, 16)), **clusters)
        some = [_plain(r) for _ in range(r.randint(0, 2))] + [routed] * r.randint(0, 1)
    elif kind == "features":
        low = _features(r)
        some = [r.choice((_plain, _bucketed))(r) for _ in range(r.randint(0, 3))]
    else:
        low = None
        some = [_plain(r) for _ in range(r.randint(0, 2))] + r.choice(([routed], [_bucketed(r)], [_plain(r)], [_bucketed(r), _bucketed(r)]))
    r.shuffle(some)
    support = None
    for part in some:
        support = part if support is None else support | part
    return {"support": support, "low_rank": low}


def _plain(r):
    return r.choice(
        (
            lambda: sb.Window(r.randint(1, 40), dilation=r.choice((1, 1, 2, 5))),
            lambda: sb.GlobalTokens(r.randint(1, 4)),
            lambda: sb.Columns(r.randint(0, 6), first=r.randint(1, 5)),
            lambda: sb.RandomBlocks(r.randint(1, 3), block=r.choice((1, 3, 8, 16)), seed=r.randint(0, 99)),
            lambda: sb.TopK(r.randint(1, 20)),
            lambda: sb.Window(200),
        )
    )()


def _bucketed(r):
    bucket, rounds, seed = r.choice((1, 3, 8, 20)), r.randint(1, 3), r.randint(0, 99)
    return r.choice(
        (
            lambda: sb.LSH(rounds, bucket=bucket, seed=seed),
            lambda: sb.LSH(rounds, bucket=bucket, scheme="reformer", seed=seed),
            lambda: sb.LSH(rounds, bucket=r.choice((None, bucket)), scheme="cross_polytope", functions=r.randint(1, 2), seed=seed),
            lambda: sb.Strided(r.randint(1, 20)),
            lambda: sb.Fixed(max(2, bucket), tail=r.randint(1, 2)),
        )
    )()


def _features(r):
    features = r.choice((2, 4, 16, 18, 34))
    return r.choice(
        (
            lambda: sb.Performer(features, seed=r.randint(0, 99)),
            lambda: sb.Performer(features, kind="cosh", orthogonal=False),
            lambda: sb.EluPlusOne(),
            lambda: sb.Linformer(features),
            lambda: sb.GlobalTokens(r.randint(1, 5)),
        )
    )()


def _at_an_odd_place(t, at=1):
    return torch.cat([t.new_zeros(at), t.flatten()])[at:].view(t.shape)


LAYOUTS = {
    "contiguous": lambda t: t,
    "length first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "width first": lambda t: t.mT.contiguous().mT,
    "heads first": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "width cut": lambda t: torch.cat([t[..., :1], t, t], -1)[..., 1 : t.shape[-1] + 1],
    "length cut": lambda t: torch.cat([t[:, :, :1], t, t], 2)[:, :, min(1, t.shape[2]) :][:, :, : t.shape[2]],
    "every other number": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
    "every third row": lambda t: torch.stack([t, t, t], 3).flatten(2, 3)[:, :, 1::3],
    "odd place": _at_an_odd_place,
    "odd place, length first": lambda t: _at_an_odd_place(t.transpose(1, 2), 3).transpose(1, 2),
    "one head": lambda t: t[:, :1].expand_as(t),
    "one batch": lambda t: t[:1].expand_as(t),
    "one row": lambda t: t[:, :, :1].expand_as(t),
}


def tensors(c):
    shapes = ((c.heads, c.n, c.d), (c.kv_heads, c.m, c.d), (c.kv_heads, c.m, c.e))
    plain = [normal(c.batch, *shape, seed=3 * c.seed + x) * (c.size if x < 2 else 1.0) for x, shape in enumerate(shapes)]
    return [LAYOUTS[layout](t.to(c.dtype)) if t.numel() else t.to(c.dtype) for layout, t in zip(c.layouts, plain, strict=True)]


def mask_of(c):
    g = torch.Generator().manual_seed(c.seed)
    if c.mask == "none":
        return None
    if c.mask == "flat":
        return torch.rand(c.m, generator=g) > 0.3
    if c.mask == "tail":
        return (torch.arange(c.m) < torch.randint(1, c.m + 2, (c.batch, 1), generator=g))[:, None, None]
    mask = torch.rand(c.batch, c.heads if c.mask == "heads" else 1, 1, c.m, generator=g) > 0.25
    if c.mask == "whole rows" and c.batch:
        mask[-1] = False
    return mask


def check(c):
    q, k, v = tensors(c)
    mask = mask_of(c)
    if 0 in (c.batch, c.n, c.m):
        out = sb.attention(q, k, v, mask, is_causal=c.causal, scale=c.scale, enable_gqa=True, impl=c.impl, **c.method)
        assert out.shape == (c.batch, c.heads, c.n, c.e) and not out.any()
        return
    wide = [t if c.dtype == torch.float32 else t.float() for t in (q, k, v)]
    out, _ = run(c.method, *wide, mask, c.causal, impl=c.impl, scale=c.scale)
    if c.dtype == torch.float32:
        return
    results = []
    for x in ((q, k, v), wide):
        inputs = [t.detach().requires_grad_() for t in x]
        result = sb.attention(*inputs, mask, is_causal=c.causal, scale=c.scale, enable_gqa=True, impl=c.impl, **c.method)
        results.append((result, inputs))
    (half, half_inputs), (full, inputs) = results
    assert half.dtype == c.dtype
    assert_rounded_once(half, full, inputs, c.scale, c.impl)
    probe = normal(*half.shape, seed=9).to(c.dtype)
    got = torch.autograd.grad((half * probe).sum(), half_inputs)
    want = torch.autograd.grad((full * probe.float()).sum(), inputs)
    steep = 2 * max(1.0, *(t.abs().max().item() for t in inputs))  # dO.out has the output's rounding, and is multiplied by q and k
    for a, b, which in zip(got, want, "qkv", strict=True):
        assert a.dtype == c.dtype
        assert_close(a.float(), b, c.dtype, 0, steep, f"half precision d{which}")


@pytest.mark.skipif(not NATIVE, reason="the native engine is not built")
@pytest.mark.parametrize("first", range(0, CASES, BUNDLE))
def test_random_cases(first):
    for seed in range(first, first + BUNDLE):
        case = draw(seed)
        try:
            check(case)
        except Exception as error:
            raise AssertionError(f"{error}\n{case}") from error


def test_the_cases_reach_everything():
    """Each value of each choice comes up often."""
    cases = [draw(seed) for seed in range(CASES)] if NATIVE else []
    for field, least in (("impl", 500), ("dtype", 300), ("mask", 200), ("n", 50), ("m", 50), ("d", 100), ("e", 100), ("scale", 200)):
        values = [getattr(c, field) for c in cases]
        assert all(values.count(v) >= least for v in set(values)), field
    assert {layout for c in cases for layout in c.layouts} == set(LAYOUTS) or not NATIVE
