"""The custom operator in PyTorch's world: opcheck, compile, autocast, vmap-free shapes, grouped heads, empty inputs."""

import pytest
import scatterbrain as sb
import torch
from scatterbrain.impl import op

from cases import COMMON, PAIRS, SIGNED, assert_close, grads, is_causal_ok, name, normal, parts, qkv, some_keys

SOME = [
    (None, "performer"),
    ("window", None),
    ("window", "performer"),
    ("smyrf", "performer"),
    ("three-overlapping", "performer-trig"),
    ("columns-window-routed", "means"),
    ("clusters", "nystrom"),
    ("topk", "means-second-order"),
]


def operator_arguments(monkeypatch, pair, causal, dropout):
    """What the operator is called with."""
    seen = []
    original = op.attention_op
    monkeypatch.setattr(op, "attention_op", lambda *args: seen.append(args) or original(*args))
    q, k, v = (t.requires_grad_() for t in qkv(12, 12, d=4, e=3, batch=1, dtype=torch.float64))
    mask = some_keys(1, 12)
    sb.attention(q, k, v, mask, dropout, causal, **parts(pair))
    args = seen[0]
    return tuple(a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("pair", SOME, ids=name)
def test_opcheck(monkeypatch, pair, dropout):
    args = operator_arguments(monkeypatch, pair, is_causal_ok(pair), dropout)
    torch.library.opcheck(torch.ops.scatterbrain.attention.default, args)


@pytest.mark.parametrize("pair", SOME, ids=name)
def test_compile_fullgraph_forward_and_backward(pair):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: sb.attention(*a, **parts(pair)), fullgraph=True, backend="aot_eager")
    q, k, v = qkv(24, 24, batch=1, dtype=torch.float32)
    one, two = ([t.clone().requires_grad_() for t in (q, k, v)] for _ in range(2))
    a, b = compiled(*one), sb.attention(*two, **parts(pair))
    assert_close(a, b.detach(), torch.float32, 10, 100.0)
    for x, y in zip(grads(a, one), grads(b, two), strict=True):
        assert_close(x, y, torch.float32, 10, 100.0)


def test_compile_default_module_with_a_mask():
    torch._dynamo.reset()
    layer = sb.ScatterbrainAttention(16, 2, budget=1 / 4).eval()
    x, hidden = normal(2, 32, 16, dtype=torch.float32), ~some_keys(2, 32)[:, 0, 0]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert compiled(x, key_padding_mask=hidden)[0].shape == x.shape
    assert_close(compiled(x)[0], layer(x)[0], torch.float32, 10)


def test_compile_with_inductor():
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: sb.attention(*a, is_causal=True, budget=1 / 4), fullgraph=True)
    q, k, v = qkv(64, 64, dtype=torch.float32)
    assert_close(compiled(q, k, v), sb.attention(q, k, v, is_causal=True, budget=1 / 4), torch.float32, 10)


@pytest.mark.parametrize("pair", SOME, ids=name)
def test_autocast_gives_what_sdpa_gives(pair):
    q, k, v = qkv(24, 24, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = sb.attention(q, k.bfloat16(), v, **parts(pair))
        assert out.dtype == torch.nn.functional.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
    plain = sb.attention(q, k.bfloat16().float(), v, **parts(pair))
    assert torch.equal(out, plain.bfloat16())


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("pair", SOME, ids=name)
def test_grouped_heads_are_repeated_heads(pair, kv_heads):
    q, k, v = normal(2, 4, 20, 8), normal(2, kv_heads, 20, 8, seed=1), normal(2, kv_heads, 20, 3, seed=2)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = sb.attention(*inputs, enable_gqa=True, **parts(pair))
    wide = [q, k.repeat_interleave(4 // kv_heads, 1), v.repeat_interleave(4 // kv_heads, 1)]
    expected = sb.attention(*wide, **parts(pair))
    assert torch.equal(out, expected)
    for got, want in zip(grads(out, inputs), grads(expected, inputs), strict=True):
        assert_close(got, want, torch.float64, 10, 100.0)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("pair", [None, *COMMON], ids=lambda p: name(p) if p else "default")
def test_empty_inputs(pair, impl):
    method = parts(pair) if pair else {}
    for b, n, m, e in ((0, 5, 5, 3), (2, 0, 5, 3), (2, 5, 0, 3), (2, 5, 5, 0), (0, 0, 0, 0)):
        q, k, v = (torch.ones(b, 2, s, w, requires_grad=True) for s, w in ((n, 4), (m, 4), (m, e)))
        out = sb.attention(q, k, v, impl=impl, **method)
        assert out.shape == (b, 2, n, e)
        assert not out.any()
        out.sum().backward()
        assert not q.grad.any()


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3, 3.0])
def test_scale(scale):
    q, k, v = qkv(30, 30)
    for pair in [p for p in SOME if p[1] not in SIGNED]:
        a = sb.attention(q, k, v, scale=scale, impl="torch", **parts(pair))
        b = sb.attention(q, k, v, scale=scale, impl="reference", **parts(pair))
        assert_close(a, b, torch.float64, 100, 10.0, name(pair))


def test_dropout_keeps_the_mean_and_drops_the_share():
    q, k, v = qkv(16, 16, batch=1, heads=1)
    for pair in (("window", None), ("window", "performer"), (None, "performer"), ("columns-window-routed", "means")):
        plain = sb.attention(q, k, v, **parts(pair))
        draws = torch.stack([sb.attention(q, k, v, dropout_p=0.3, **parts(pair)) for _ in range(600)])
        error = (draws.mean(0) - plain).abs() / (draws.std(0) / 600**0.5 + 1e-12)
        assert error.max() < 5, name(pair)
    eye = torch.eye(64, dtype=torch.float64)[None, None].expand(1, 2, 64, 64)
    dropped = sb.attention(eye, eye, eye, dropout_p=0.25, support=sb.Full()) == 0
    assert 0.22 < dropped.double().mean() < 0.28
    assert not torch.equal(dropped[0, 0, 0], dropped[0, 0, 1])
    assert not sb.attention(q, k, v, dropout_p=1.0).any()


def test_reference_and_torch_share_no_module():
    import inspect

    from scatterbrain.impl import reference

    source = inspect.getsource(reference)
    assert "impl.torch" not in source and "from .torch" not in source
    assert len(PAIRS) > 200


@pytest.mark.parametrize("pair", [p for p in SOME if p[1] in ("performer", "nystrom", "performer-trig")], ids=name)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_heads_done_some_at_a_time_give_the_same(monkeypatch, pair, dropout):
    from scatterbrain import functional

    q, k, v = qkv(30, 30)
    seen = []
    for at_once in (2**26, 1):
        monkeypatch.setattr(functional, "FEATURES_AT_ONCE", at_once)
        torch.manual_seed(1)
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        out = sb.attention(*inputs, dropout_p=dropout, **parts(pair))
        seen.append((out.detach(), *grads(out, inputs)))
    for one, other in zip(*seen, strict=True):
        assert_close(one, other, torch.float64, 10, 1e3)
