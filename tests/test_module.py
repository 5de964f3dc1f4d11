"""The layer: nn.MultiheadAttention's habits, one draw, a state dict that carries it. Rule 9."""

import concurrent.futures

import pytest
import scatterbrain as sb
import torch

from cases import COMMON, EACH, assert_close, is_causal_ok, name, normal, parts, qkv

X = normal(2, 21, 16, dtype=torch.float32)
LAYERS = {
    "default": {},
    "published": {"support": sb.LSH(2, bucket=4), "low_rank": sb.Performer(8)},
    "longformer": {"support": sb.Window(5) | sb.GlobalTokens(2), "low_rank": None},
    "linformer": {"low_rank": sb.Linformer(4, length=32)},
    "union": {"support": sb.LSH(1, scheme="reformer", bucket=4) | sb.LSH(1, scheme="cross_polytope", bucket=4), "low_rank": sb.EluPlusOne()},
}


def layer(which, **more):
    return sb.ScatterbrainAttention(16, 4, **LAYERS[which], **more)


@pytest.mark.parametrize("which", LAYERS)
def test_state_dict_carries_the_draw_into_a_fresh_instance(which):
    a = layer(which, generator=torch.Generator().manual_seed(7)).eval()
    b = layer(which, generator=torch.Generator().manual_seed(8)).eval()
    if which in ("published", "union", "linformer"):
        assert not torch.equal(a(X)[0], b(X)[0])
    b.load_state_dict(a.state_dict())
    assert torch.equal(a(X)[0], b(X)[0])


def test_random_parts_are_buffers_and_learned_ones_parameters():
    names = dict(layer("published").named_buffers())
    assert set(names) == {"support_projection", "low_rank_projection"}
    assert "low_rank_projection" in dict(layer("linformer").named_parameters())
    module = layer("linformer")
    module(X)[0].sum().backward()
    assert module.low_rank_projection.grad.abs().sum() > 0


def test_redraw_only_when_asked():
    module = layer("published").eval()
    first = module(X)[0]
    assert torch.equal(first, module(X)[0])
    module.redraw(torch.Generator().manual_seed(3))
    second = module(X)[0]
    assert not torch.equal(first, second)
    module.redraw(torch.Generator().manual_seed(3))
    assert torch.equal(second, module(X)[0])


def test_training_drops_and_eval_does_not():
    module = layer("default", dropout=0.5)
    assert not torch.equal(module(X)[0], module(X)[0])
    module.eval()
    assert torch.equal(module(X)[0], module(X)[0])


@pytest.mark.parametrize("which", ["default", "longformer"])
def test_causal_padding_layouts(which):
    module = layer(which, is_causal=True).eval()
    out, none = module(X)
    assert none is None
    later = X.clone()
    later[:, 12:] += 3
    assert (module(later)[0][:, :12] - out[:, :12]).abs().max() < 1e-5
    turned = sb.ScatterbrainAttention(16, 4, **LAYERS[which], is_causal=True, batch_first=False).eval()
    turned.load_state_dict(module.state_dict())
    assert_close(turned(X.transpose(0, 1))[0].transpose(0, 1), out, torch.float32, 10)
    assert_close(module(X[0])[0], out[0], torch.float32, 10)


def test_padding_changes_nothing():
    module = layer("published").eval()
    padded = torch.cat([X, torch.full_like(X[:, :5], 7.0)], 1)
    hidden = torch.zeros(2, 26, dtype=torch.bool)
    hidden[:, 21:] = True
    assert_close(module(padded, key_padding_mask=hidden)[0][:, :21], module(X)[0], torch.float32, 10)


def test_cross_attention_widths_and_shared_heads():
    module = sb.ScatterbrainAttention(16, 4, kdim=6, vdim=9, num_kv_heads=2, budget=1 / 2)
    out, _ = module(X, normal(2, 30, 6, dtype=torch.float32), normal(2, 30, 9, dtype=torch.float32))
    assert out.shape == X.shape


def test_weights_come_from_the_reference():
    module = sb.ScatterbrainAttention(16, 4, impl="reference", dropout=0.0)
    _, weights = module(X, need_weights=True)
    assert weights.shape == (2, 21, 21)
    assert_close(weights.sum(-1), torch.ones(2, 21), torch.float32)
    assert module(X, need_weights=True, average_attn_weights=False)[1].shape == (2, 4, 21, 21)


def test_moves_and_casts():
    module = layer("published").to(torch.float64)
    assert module.support_projection.dtype == torch.float64
    assert module(X.double())[0].dtype == torch.float64
    bf = layer("published").to(torch.bfloat16)
    assert bf(X.bfloat16())[0].dtype == torch.bfloat16


@pytest.mark.parametrize("pair", EACH, ids=name)
def test_same_seed_same_output_and_another_seed_another(pair):
    q, k, v = qkv(40, 40)
    out = sb.attention(q, k, v, **parts(pair))
    assert torch.equal(out, sb.attention(q, k, v, **parts(pair)))
    config = next(p for p in parts(pair).values() if p is not None)
    key = "support" if pair[0] else "low_rank"
    assert torch.equal(out, sb.attention(q, k, v, **{key: config.sample(8)}))
    other = sb.attention(q, k, v, **{key: config.sample(8, torch.Generator().manual_seed(99))})
    assert torch.equal(out, other) == (not config.sample(8).state)


def test_threads_do_not_disturb_each_other():
    q, k, v = qkv(60, 60, dtype=torch.float32)
    pairs = [p for p in COMMON if is_causal_ok(p)][::5]
    expected = [sb.attention(q, k, v, is_causal=True, **parts(p)) for p in pairs]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(sb.attention, q, k, v, is_causal=True, **parts(p)) for _ in range(3) for p in pairs]
    for n, job in enumerate(jobs):
        assert torch.equal(job.result(), expected[n % len(pairs)])
