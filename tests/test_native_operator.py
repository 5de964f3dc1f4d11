"""The native engine in PyTorch's world: opcheck, compile, autocast, grouped heads, empty inputs, modules, checkpoints."""

import copy
import pickle

import pytest
import scatterbrain as sb
import torch
from scatterbrain.impl import op
from torch.utils.checkpoint import checkpoint

from cases import COVERED_COMMON, NATIVE, assert_close, extreme, grads, is_causal_ok, name, normal, parts, qkv, run, some_keys

SINGLE = torch.float32
every_engine = pytest.mark.parametrize("impl", NATIVE)
SOME = [
    (None, "performer"),
    (None, "means"),
    ("window", None),
    ("window", "performer"),
    ("smyrf", "performer"),
    ("reformer", "performer"),
    ("columns-heavy", None),
    ("global", "performer"),
    ("routed-keys", "means"),
    ("columns-window-routed", "means"),
]


def operator_arguments(monkeypatch, pair, impl):
    """What the operator is called with."""
    seen = []
    original = op.attention_op
    monkeypatch.setattr(op, "attention_op", lambda *args: seen.append(args) or original(*args))
    q, k, v = (t.requires_grad_() for t in qkv(12, 12, d=4, e=3, batch=1, dtype=SINGLE))
    sb.attention(q, k, v, some_keys(1, 12), is_causal=is_causal_ok(pair), impl=impl, **parts(pair))
    return tuple(a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in seen[0])


@every_engine
@pytest.mark.parametrize("pair", SOME, ids=name)
def test_opcheck(monkeypatch, pair, impl):
    torch.library.opcheck(torch.ops.scatterbrain.attention.default, operator_arguments(monkeypatch, pair, impl), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("pair", SOME, ids=name)
def test_compile_fullgraph_forward_and_backward(pair):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: sb.attention(*a, impl=NATIVE[0], **parts(pair)), fullgraph=True, backend="aot_eager")
    q, k, v = qkv(24, 24, batch=1, dtype=SINGLE)
    one, two = ([t.clone().requires_grad_() for t in (q, k, v)] for _ in range(2))
    a, b = compiled(*one), sb.attention(*two, impl=NATIVE[0], **parts(pair))
    assert_close(a, b.detach(), SINGLE, 10)
    for x, y in zip(grads(a, one), grads(b, two), strict=True):
        assert_close(x, y, SINGLE, 10, 10.0)


@pytest.mark.parametrize("causal", [False, True])
def test_compile_the_default_with_inductor_a_mask_and_grouped_heads(causal):
    torch._dynamo.reset()
    q, k, v = normal(2, 4, 64, 8, dtype=SINGLE), normal(2, 2, 64, 8, seed=1, dtype=SINGLE), normal(2, 2, 64, 5, seed=2, dtype=SINGLE)
    method, mask = sb.presets.default(24, length=64, causal=causal), some_keys(2, 64)

    def f(*a):
        return sb.attention(*a, mask, is_causal=causal, enable_gqa=True, **method)

    assert_close(torch.compile(f, fullgraph=True)(q, k, v), f(q, k, v), SINGLE, 10)


@every_engine
@pytest.mark.parametrize("pair", SOME, ids=name)
def test_autocast_gives_what_sdpa_gives(pair, impl):
    q, k, v = qkv(24, 24, dtype=SINGLE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = sb.attention(q, k.bfloat16(), v, impl=impl, **parts(pair))
        assert out.dtype == torch.nn.functional.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
    plain = sb.attention(q, k.bfloat16().float(), v, impl=impl, **parts(pair))
    assert torch.equal(out, plain.bfloat16())


@every_engine
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("pair", SOME, ids=name)
def test_grouped_heads(pair, kv_heads, impl):
    q, k, v = normal(2, 4, 40, 8, dtype=SINGLE), normal(2, kv_heads, 40, 8, seed=1, dtype=SINGLE), normal(2, kv_heads, 40, 3, seed=2, dtype=SINGLE)
    per_head = torch.rand(2, 4, 1, 40, generator=torch.Generator().manual_seed(1)) > 0.2
    for mask in (None, some_keys(2, 40), per_head):
        run(pair, q, k, v, mask, impl=impl)
        if is_causal_ok(pair):
            run(pair, q, k, v, mask, causal=True, impl=impl)


@every_engine
@pytest.mark.parametrize("pair", SOME, ids=name)
def test_grouped_heads_are_repeated_heads(pair, impl):
    q, k, v = normal(2, 4, 20, 8, dtype=SINGLE), normal(2, 2, 20, 8, seed=1, dtype=SINGLE), normal(2, 2, 20, 3, seed=2, dtype=SINGLE)
    out = sb.attention(q, k, v, enable_gqa=True, impl=impl, **parts(pair))
    assert torch.equal(out, sb.attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), impl=impl, **parts(pair)))


@every_engine
@pytest.mark.parametrize("pair", [None, *COVERED_COMMON], ids=lambda p: name(p) if p else "default")
def test_empty_inputs(pair, impl):
    method = parts(pair) if pair else {}
    for b, n, m, e in ((0, 5, 5, 3), (2, 0, 5, 3), (2, 5, 0, 3), (2, 5, 5, 0), (0, 0, 0, 0)):
        q, k, v = (torch.ones(b, 2, s, w, requires_grad=True) for s, w in ((n, 4), (m, 4), (m, e)))
        out = sb.attention(q, k, v, impl=impl, **method)
        assert out.shape == (b, 2, n, e)
        assert not out.any()
        out.sum().backward()
        assert not q.grad.any()


@every_engine
@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3, 3.0])
@pytest.mark.parametrize("pair", SOME, ids=name)
def test_scale(pair, scale, impl):
    run(pair, *qkv(30, 30, dtype=SINGLE), impl=impl, scale=scale)


@every_engine
@pytest.mark.parametrize("dropout_free", [(None, "performer"), ("window", "performer"), ("global", "elu")], ids=name)
def test_heads_done_some_at_a_time_give_the_same(monkeypatch, dropout_free, impl):
    from scatterbrain import functional

    q, k, v = qkv(30, 30, dtype=SINGLE)
    seen = []
    for at_once in (2**26, 1):
        monkeypatch.setattr(functional, "FEATURES_AT_ONCE", at_once)
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        out = sb.attention(*inputs, some_keys(2, 30), impl=impl, **parts(dropout_free))
        seen.append((out.detach(), *grads(out, inputs)))
    for one, other in zip(*seen, strict=True):
        assert_close(one, other, SINGLE, 10, 10.0)


@every_engine
def test_heads_done_some_at_a_time_with_grouped_heads(monkeypatch, impl):
    from scatterbrain import functional

    q, k, v = normal(2, 4, 30, 8, dtype=SINGLE), normal(2, 2, 30, 8, seed=1, dtype=SINGLE), normal(2, 2, 30, 3, seed=2, dtype=SINGLE)
    monkeypatch.setattr(functional, "FEATURES_AT_ONCE", 1)
    for pair in (("window", "performer"), ("smyrf", "performer")):
        run(pair, q, k, v, some_keys(2, 30), impl=impl)


@every_engine
def test_module_and_checkpoint(impl):
    layer = sb.ScatterbrainAttention(32, 4, budget=1 / 4, is_causal=True, impl=impl)
    x = normal(2, 50, 32, dtype=SINGLE).requires_grad_()
    plain = layer(x)[0]
    assert torch.equal(plain, copy.deepcopy(layer)(x)[0])
    assert torch.equal(plain, pickle.loads(pickle.dumps(layer))(x)[0])
    again = checkpoint(lambda t: layer(t)[0], x, use_reentrant=False)
    for a, b in zip(grads(plain, [x, *layer.parameters()]), grads(again, [x, *layer.parameters()]), strict=True):
        assert torch.equal(a, b)


@every_engine
def test_only_some_inputs_learn(impl):
    for pair in SOME:
        q, k, v = qkv(20, 20, dtype=SINGLE)
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        expected = grads(sb.attention(*inputs, impl=impl, **parts(pair)), inputs)
        for at in range(3):
            some = [t.clone().requires_grad_(x == at) for x, t in enumerate((q, k, v))]
            assert torch.equal(grads(sb.attention(*some, impl=impl, **parts(pair)), [some[at]])[0], expected[at]), name(pair)


@every_engine
def test_inputs_are_left_alone_and_results_do_not_change_from_call_to_call(impl):
    for pair in SOME:
        q, k, v = extreme("spike", *qkv(70, 70, batch=1, dtype=SINGLE))
        before = [t.clone() for t in (q, k, v)]
        first, second = (sb.attention(q, k, v, impl=impl, **parts(pair)) for _ in range(2))
        assert torch.equal(first, second), name(pair)
        assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v), strict=True))
