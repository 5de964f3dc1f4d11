"""The contract for the native engine: every pair that it covers, on every instruction set, against the dense reference."""

import os
import shutil
import warnings

import pytest
import scatterbrain as sb
import torch
from scatterbrain.impl import native

from cases import (
    COVERED,
    COVERED_COMMON,
    EXTREMES,
    NATIVE,
    assert_close,
    assert_rounded_once,
    extreme,
    grads,
    is_causal_ok,
    name,
    normal,
    parts,
    qkv,
    run,
    some_keys,
)

LENGTHS = [(50, 50), (37, 61), (61, 37), (1, 9), (9, 1), (1, 1), (17, 16), (97, 95)]
SINGLE = torch.float32
every_engine = pytest.mark.parametrize("impl", NATIVE)
WIDE = [("three-overlapping", "performer"), ("columns-window-routed", "means"), *((s, "performer") for s in ("smyrf", "window", "reformer"))]


def test_the_engine_is_built_where_there_is_a_compiler():
    compiler = os.environ.get("CXX", "g++").split()[0]
    if shutil.which(compiler):
        assert "portable" in native.isas()


@every_engine
@pytest.mark.parametrize("pair", COVERED, ids=name)
def test_equals_reference_in_every_combination(pair, impl):
    for causal in (False, True) if is_causal_ok(pair) else (False,):
        n = 70 if causal else 50
        q, k, v = qkv(n, n, dtype=SINGLE)
        run(pair, q, k, v, causal=causal, impl=impl, what=f"causal={causal}")
        run(pair, q, k, v, some_keys(2, n), causal=causal, impl=impl, what=f"padding causal={causal}")


@every_engine
@pytest.mark.parametrize("pair", COVERED_COMMON, ids=name)
def test_lengths(pair, impl):
    for n, m in LENGTHS:
        run(pair, *qkv(n, m, dtype=SINGLE), impl=impl, what=f"{n}x{m}")
        if is_causal_ok(pair):
            run(pair, *qkv(n, m, dtype=SINGLE), some_keys(2, m), causal=True, impl=impl, what=f"causal {n}x{m}")


@every_engine
@pytest.mark.parametrize("pair", COVERED_COMMON, ids=name)
def test_longer_than_a_tile(pair, impl):
    """Several blocks of queries, chunks and panels; rows that need no padding."""
    q, k, v = qkv(300, 300, d=16, e=16, batch=1, dtype=SINGLE)
    for causal in (False, True) if is_causal_ok(pair) else (False,):
        run(pair, q, k, v, causal=causal, impl=impl, what=f"causal={causal}")


@every_engine
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("entries", [20, 60, 150])
def test_the_default_at_several_budgets(entries, causal, impl):
    q, k, v = qkv(420, 420, d=16, e=9, batch=1, dtype=SINGLE)
    mask = some_keys(1, 420)
    mask[..., 390:] = False
    method = sb.presets.default(entries, length=420, causal=causal)
    run(method, q, k, v, causal=causal, impl=impl)
    run(method, q, k, v, mask, causal=causal, impl=impl, what="padding")


@every_engine
@pytest.mark.parametrize("pair", COVERED_COMMON, ids=name)
def test_rows_without_keys_are_zero_and_take_no_gradient(pair, impl):
    q, k, v = qkv(20, 24, dtype=SINGLE)
    mask = torch.ones(2, 1, 1, 24, dtype=torch.bool)
    mask[1] = False
    out, _ = run(pair, q, k, v, mask, impl=impl)
    assert not out[1].any()
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    for g in grads(sb.attention(*inputs, mask, impl=impl, **parts(pair)), inputs):
        assert not g[1].any()


@every_engine
@pytest.mark.parametrize("case", EXTREMES)
@pytest.mark.parametrize("pair", COVERED_COMMON, ids=name)
def test_extreme_inputs(pair, case, impl):
    q, k, v = extreme(case, *qkv(70, 70, batch=1, dtype=SINGLE))
    for causal in (False, True) if is_causal_ok(pair) else (False,):
        run(pair, q, k, v, causal=causal, gradients=case != "norms-1e3", impl=impl, what=f"{case} causal={causal}")


@every_engine
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pair", COVERED_COMMON, ids=name)
def test_half_precision_accumulates_in_float32(pair, dtype, impl):
    """The result is the float32 one, rounded once; so are the gradients, but for features', which are rounded on the way."""
    half = [t.to(dtype).requires_grad_() for t in qkv(40, 43, batch=1)]
    wide = [t.detach().float().requires_grad_() for t in half]
    mask = some_keys(1, 43)
    out, expected = (sb.attention(*x, mask, impl=impl, **parts(pair)) for x in (half, wide))
    assert out.dtype == dtype
    assert_rounded_once(out, expected, wide, None, impl)
    probe = normal(*out.shape, seed=9).to(dtype)
    got, want = (torch.autograd.grad((o * probe.to(o.dtype)).sum(), x) for o, x in ((out, half), (expected, wide)))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        assert_close(a.float(), b, dtype, 0, 1.0, name(pair))


@every_engine
@pytest.mark.parametrize("pair", COVERED_COMMON, ids=name)
def test_memory_that_was_not_written_is_not_read(pair, impl):
    """Fresh memory holds NaN here, and so does what the mask hides."""
    q, k, v = qkv(40, 43, dtype=SINGLE)
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(pair, q, k, v, some_keys(2, 43), impl=impl)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


@every_engine
@pytest.mark.parametrize("pair", COVERED_COMMON, ids=name)
def test_what_padding_holds_does_not_matter(pair, impl):
    for causal in (False, True) if is_causal_ok(pair) else (False,):
        q, k, v = qkv(40, 43, dtype=SINGLE)
        mask = some_keys(2, 43)
        plain = attend_and_differentiate(pair, q, k, v, mask, causal, impl)
        hidden = ~mask[:, :, 0, :, None]
        poisoned = attend_and_differentiate(pair, q, k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.inf), mask, causal, impl)
        for a, b in zip(plain, poisoned, strict=True):
            assert torch.equal(a, b)


@every_engine
@pytest.mark.parametrize("pair", COVERED_COMMON, ids=name)
def test_strides_do_not_matter(pair, impl):
    """To the bit, but for features: torch makes those, and its products round by the strides."""
    q, k, v = qkv(24, 24, d=16, e=16, dtype=SINGLE)
    plain = attend_and_differentiate(pair, q, k, v, None, False, impl)
    for other in views_of((q, k, v)):
        for a, b in zip(plain, attend_and_differentiate(pair, *other, None, False, impl), strict=True):
            assert_close(a, b, SINGLE, 10, what=name(pair))
            assert pair[1] not in (None, "means") or torch.equal(a, b)


@every_engine
@pytest.mark.parametrize("pair", COVERED_COMMON, ids=name)
def test_expanded_tensors(pair, impl):
    """The same queries and keys for each head and batch, held once."""
    q, k, v = (t[:1, :1].expand(2, 2, -1, -1) for t in qkv(24, 24, dtype=SINGLE))
    run(pair, q, k, v, impl=impl)


@every_engine
@pytest.mark.parametrize("pair", [p for p in COVERED if all(p)][::5], ids=name)
def test_double_count_adds_both(pair, impl):
    q, k, v = qkv(40, 40, dtype=SINGLE)
    try:
        sb.attention(q, k, v, double_count=True, impl=impl, **parts(pair))
    except ValueError as error:
        assert pair[1] in ("means", "means-fitted") or "global" in pair[0] or pair[0] == "three-overlapping", error
        return
    run(pair, q, k, v, impl=impl, double_count=True)


@every_engine
@pytest.mark.parametrize("d, e", [(1, 1), (3, 17), (17, 3), (64, 64), (80, 96), (256, 256), (255, 1), (1, 256), (128, 31)])
def test_head_and_value_widths(d, e, impl):
    q, k, v = normal(1, 2, 65, d, dtype=SINGLE), normal(1, 2, 65, d, seed=1, dtype=SINGLE), normal(1, 2, 65, e, seed=2, dtype=SINGLE)
    for pair in WIDE:
        for causal in (False, True) if is_causal_ok(pair) else (False,):
            run(pair, q, k, v, causal=causal, impl=impl, what=f"d={d} e={e} causal={causal}")


def attend_and_differentiate(pair, q, k, v, mask, causal, impl):
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    out = sb.attention(*inputs, mask, is_causal=causal, impl=impl, **parts(pair))
    return out.detach(), *grads(out, inputs)


def views_of(tensors):
    """The same numbers, lying in memory in other ways."""
    yield [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    yield [torch.cat([t, t], -1)[..., : t.shape[-1]] for t in tensors]
    yield [t.mT.contiguous().mT for t in tensors]
    yield [torch.cat([t[..., :1, :], t], -2)[..., 1:, :] for t in tensors]
    for at in (1, 3):
        yield [torch.cat([t.flatten()[:at], t.flatten()])[at:].view(t.shape) for t in tensors]
