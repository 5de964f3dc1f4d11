"""The contract: every support and map, through the same matrix, against the dense reference."""

import warnings

import pytest
import scatterbrain as sb
import torch
from scatterbrain.impl import op
from scatterbrain.problem import check_inputs, resolve

from cases import COMMON, EACH, EXTREMES, PAIRS, SIGNED, assert_close, extreme, grads, is_causal_ok, name, normal, parts, qkv, run, some_keys, truth

LENGTHS = [(50, 50), (37, 61), (61, 37), (1, 9), (9, 1), (1, 1)]


@pytest.mark.parametrize("pair", PAIRS, ids=name)
def test_equals_reference_in_every_combination(pair):
    q, k, v = qkv(50, 50)
    run(pair, q, k, v)
    run(pair, q, k, v, some_keys(2, 50), what="padding")


@pytest.mark.parametrize("pair", [p for p in PAIRS if is_causal_ok(p)], ids=name)
def test_equals_reference_causal(pair):
    q, k, v = qkv(70, 70)
    run(pair, q, k, v, causal=True)
    run(pair, q, k, v, some_keys(2, 70), causal=True, what="padding")


@pytest.mark.parametrize("pair", COMMON, ids=name)
def test_lengths(pair):
    for n, m in LENGTHS:
        run(pair, *qkv(n, m), what=f"{n}x{m}")
        if is_causal_ok(pair):
            run(pair, *qkv(n, m), some_keys(2, m), causal=True, what=f"causal {n}x{m}")


@pytest.mark.parametrize("pair", COMMON, ids=name)
def test_longer_than_a_tile(pair):
    """Several blocks, chunks and waves; float32, in which the digits would show."""
    q, k, v = qkv(300, 300, d=16, e=7, batch=1, dtype=torch.float32)
    steps = ((False, None), (True, None)) if is_causal_ok(pair) else ((False, None),)
    big = parts(pair)
    if pair[1] == "linformer-signed":
        big["low_rank"] = sb.Linformer(6, length=300)
    for causal, mask in steps:
        out = sb.attention(q, k, v, mask, is_causal=causal, **big)
        expected = truth(q, k, v, mask, causal, **big)
        assert_close(out, expected.out.detach(), torch.float32, expected.logits, expected.condition, name(pair))


@pytest.mark.parametrize("pair", COMMON, ids=name)
def test_rows_without_keys_are_zero_and_take_no_gradient(pair):
    q, k, v = qkv(20, 24)
    mask = torch.ones(2, 1, 1, 24, dtype=torch.bool)
    mask[1] = False
    out, _ = run(pair, q, k, v, mask)
    assert not out[1].any()
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    for g in grads(sb.attention(*inputs, mask, **parts(pair)), inputs):
        assert not g[1].any()


@pytest.mark.parametrize("pair", [p for p in COMMON if p[1] not in SIGNED], ids=name)
@pytest.mark.parametrize("case", EXTREMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_inputs(pair, case, dtype):
    """Rule 7. Signed maps cancel by nature at such sizes and are left out; see test_signed_maps_stay_finite."""
    q, k, v = extreme(case, *qkv(70, 70, batch=1, dtype=dtype))
    for causal in (False, True) if is_causal_ok(pair) else (False,):
        run(pair, q, k, v, causal=causal, gradients=case != "norms-1e3", what=case)


@pytest.mark.parametrize("low_rank", SIGNED)
def test_signed_maps_stay_finite(low_rank):
    q, k, v = qkv(40, 40, dtype=torch.float32)
    for factor in (1.0, 100.0):
        assert torch.isfinite(sb.attention(q * factor, k * factor, v, **parts((None, low_rank)))).all()


@pytest.mark.parametrize("pair", EACH, ids=name)
def test_gradcheck(pair):
    """Rule 8: the selection is fixed by the small step; weights of keys inside clusters, which move with it, are held."""
    q, k, v = (t.requires_grad_() for t in qkv(13, 11, d=4, e=3, batch=1, heads=1))
    fitted = pair[1] == "means-fitted"
    first = check_inputs(q, k, v, None, 0.0, False, None, False)
    held = first.factors(resolve(**parts(pair), budget=None, double_count=False, problem=first)) if fitted else None

    def f(*args):
        if held is None:
            return sb.attention(*args, **parts(pair))
        p = check_inputs(*args, None, 0.0, False, None, False)
        return op.attend(p.q * p.scale, p.k, p.v, *held, None, False)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.autograd.gradcheck(f, (q, k, v), eps=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pair", COMMON, ids=name)
def test_half_precision_accumulates_in_float32(pair, dtype):
    """The result is the float32 one, rounded once."""
    q, k, v = (t.to(dtype) for t in qkv(40, 40, batch=1))
    out = sb.attention(q, k, v, impl="torch", **parts(pair))
    assert out.dtype == dtype
    wide = sb.attention(q.float(), k.float(), v.float(), impl="torch", **parts(pair))
    assert torch.equal(out, wide.to(dtype))


@pytest.mark.parametrize("pair", COMMON, ids=name)
def test_memory_that_was_not_written_is_not_read(pair):
    """Fresh memory holds NaN here."""
    q, k, v = qkv(40, 43)
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(pair, q, k, v, some_keys(2, 43))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


@pytest.mark.parametrize("pair", COMMON, ids=name)
def test_strides_do_not_matter(pair):
    q, k, v = qkv(24, 24)
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    sliced = [torch.cat([t, t], -1)[..., : t.shape[-1]] for t in (q, k, v)]
    plain = sb.attention(q, k, v, **parts(pair))
    for other in (strided, sliced):
        assert torch.equal(plain, sb.attention(*other, **parts(pair)))


@pytest.mark.parametrize("pair", COMMON, ids=name)
def test_dropout_drops_whole_pairs_alike_in_both_implementations(pair):
    q, k, v = qkv(30, 34)
    seen = {}
    for impl in ("torch", "reference"):
        torch.manual_seed(11)
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        out = sb.attention(*inputs, dropout_p=0.4, impl=impl, **parts(pair))
        seen[impl] = (out.detach(), *grads(out, inputs))
    condition = 1e4 if pair[1] in SIGNED else 10.0
    for got, want in zip(seen["torch"], seen["reference"], strict=True):
        assert_close(got, want, torch.float64, 10, condition, name(pair))


@pytest.mark.parametrize("pair", [p for p in PAIRS if all(p)][::7], ids=name)
def test_double_count_adds_both(pair):
    q, k, v = qkv(40, 40)
    run(pair, q, k, v, double_count=True)


def test_a_wrong_output_fails_the_tolerance():
    q, k, v = qkv(30, 30, dtype=torch.float32)
    expected = truth(q, k, v, support=sb.Window(8)).out.detach()
    assert_close(expected.float(), expected, torch.float32)
    for wrong in (expected * 1.001, expected + 1e-3, expected.roll(1, 2), torch.full_like(expected, torch.nan)):
        with pytest.raises(AssertionError):
            assert_close(wrong.float(), expected, torch.float32)
    one = expected.clone()
    one[0, 0, 3, 2] += 2e-3
    with pytest.raises(AssertionError):
        assert_close(one.float(), expected, torch.float32)
    close = sb.attention(q, k, v, support=sb.Window(10))
    with pytest.raises(AssertionError):
        assert_close(close, expected, torch.float32)


def test_value_width_and_odd_head_width():
    for d, e in ((1, 1), (3, 17), (17, 3)):
        q, k, v = normal(1, 2, 33, d), normal(1, 2, 33, d, seed=1), normal(1, 2, 33, e, seed=2)
        for pair in (("three-overlapping", "performer"), ("columns-window-routed", "means"), ("smyrf", "performer")):
            run(pair, q, k, v, what=f"d={d} e={e}")
