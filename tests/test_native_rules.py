"""The rules of the design for the native engine, on every instruction set, and what it leaves to torch."""

import math

import pytest
import scatterbrain as sb
import torch
from scatterbrain.impl import native

from cases import (
    COVERED,
    COVERED_COMMON,
    EACH,
    MAPS,
    NATIVE,
    PAIRS,
    assert_close,
    grads,
    is_causal_ok,
    name,
    normal,
    parts,
    qkv,
    refused,
    some_keys,
    truth,
)

SINGLE = torch.float32
every_engine = pytest.mark.parametrize("impl", NATIVE)
BUDGETS = [1 / 8, 1 / 3, 1.0]


def softmax_attention(q, k, v):
    return torch.softmax(q.double() @ k.double().mT / math.sqrt(q.shape[-1]), -1) @ v.double()


# Rule 2


FULL = [sb.Full(), sb.Window(2000), sb.TopK(24), sb.Window(4) | sb.Full(), sb.GlobalTokens(24), sb.Columns(0, first=24)]


@every_engine
@pytest.mark.parametrize("low_rank", [None, *(m for m in MAPS if not refused((None, m)))])
@pytest.mark.parametrize("full", FULL, ids=repr)
def test_full_support_is_softmax_attention(full, low_rank, impl):
    q, k, v = qkv(24, 24, dtype=SINGLE)
    out = sb.attention(q, k, v, support=full, low_rank=MAPS.get(low_rank), impl=impl)
    assert_close(out, softmax_attention(q, k, v), SINGLE, 10)


@every_engine
@pytest.mark.parametrize("low_rank", [m for m in MAPS if not refused((None, m))])
def test_empty_support_is_the_low_rank_method(low_rank, impl):
    """A support that reaches no visible key, against no support at all."""
    q, k, v = qkv(24, 24, dtype=SINGLE)
    mask = torch.ones(2, 1, 1, 24, dtype=torch.bool)
    mask[..., 3] = False
    with_empty = sb.attention(q, k, v, mask, support=sb.Columns(0, index=(3,)), low_rank=MAPS[low_rank], impl=impl)
    alone = sb.attention(q, k, v, mask, low_rank=MAPS[low_rank], impl=impl)
    assert_close(with_empty, alone, SINGLE, 10)


# Rule 3


@every_engine
@pytest.mark.parametrize("pair", [p for p in COVERED_COMMON if p[0] and p[1] in (None, "performer", "means")], ids=name)
def test_overlapping_supports_count_once(pair, impl):
    q, k, v = qkv(40, 40, dtype=SINGLE)
    one, other, low = parts(pair)["support"], sb.Window(9) | sb.Columns(3), parts(pair)["low_rank"]
    alone = sb.attention(q, k, v, support=one, low_rank=low, impl=impl)
    if "routed" not in pair[0]:
        assert_close(sb.attention(q, k, v, support=one | one | one, low_rank=low, impl=impl), alone, SINGLE, 10)
    a = sb.attention(q, k, v, support=one | other, low_rank=low, impl=impl)
    b = sb.attention(q, k, v, support=other | one | sb.Window(7), low_rank=low, impl=impl)
    assert_close(a, b, SINGLE, 10)


# Rule 5


@every_engine
@pytest.mark.parametrize("change", ["small", "huge"])
@pytest.mark.parametrize("pair", [p for p in COVERED if is_causal_ok(p)], ids=name)
def test_causal_rows_do_not_see_later_tokens(pair, change, impl):
    """Selected pairs equal, outputs to 1e-5 of their size."""
    n = 70
    q, k, v = qkv(n, n, batch=1, dtype=SINGLE)
    for t in (0, 31, 40):
        later = [x.clone() for x in (q, k, v)]
        for seed, x in enumerate(later):
            x[:, :, t + 1 :] = normal(1, 2, n - t - 1, x.shape[-1], seed=20 + seed) * (1.0 if change == "small" else 1e3)
        a, b = (truth(*x, causal=True, impl=impl, **parts(pair)) for x in ((q, k, v), later))
        assert torch.equal(a.support[:, :, : t + 1], b.support[:, :, : t + 1])
        one, two = (sb.attention(*x, is_causal=True, impl=impl, **parts(pair))[:, :, : t + 1] for x in ((q, k, v), later))
        assert (one - two).abs().max() <= 1e-5 * (1 + one.abs().max())
        assert not torch.equal(a.out[:, :, t + 1 :], b.out[:, :, t + 1 :])


@every_engine
@pytest.mark.parametrize("budget", [1 / 8, 1 / 4])
@pytest.mark.parametrize("n", [70, 600])
def test_the_default_is_causal(n, budget, impl):
    q, k, v = qkv(n, n, batch=1, dtype=SINGLE)
    for t in (n // 4, n * 2 // 3):
        later = [x.clone() for x in (q, k, v)]
        for x in later:
            x[:, :, t + 1 :] *= 50
        a, b = (sb.attention(*x, is_causal=True, budget=budget, impl=impl)[:, :, : t + 1] for x in ((q, k, v), later))
        assert (a - b).abs().max() <= 1e-5


# Rule 6


@every_engine
@pytest.mark.parametrize("garbage", [1.0, 1e4, math.nan])
@pytest.mark.parametrize("pair", COVERED_COMMON, ids=name)
def test_appended_masked_keys_change_nothing(pair, garbage, impl):
    """Keys alone, and tokens (queries too), as a padded batch has them."""
    n, extra = 40, 17
    q, k, v = qkv(n, n, dtype=SINGLE)
    pad = [torch.cat([x, torch.full_like(x[:, :, :extra], 1.0) * garbage], 2) for x in (q, k, v)]
    mask = torch.ones(2, 1, 1, n + extra, dtype=torch.bool)
    mask[..., n:] = False
    for causal in (False, True) if is_causal_ok(pair) else (False,):
        plain = sb.attention(q, k, v, is_causal=causal, impl=impl, **parts(pair))
        keys_only = sb.attention(q, pad[1], pad[2], mask, is_causal=causal, impl=impl, **parts(pair))
        assert_close(keys_only, plain, SINGLE, 10, what="keys")
        if math.isfinite(garbage):
            tokens = sb.attention(*pad, mask, is_causal=causal, impl=impl, **parts(pair))[:, :, :n]
            assert_close(tokens, plain, SINGLE, 10, what="tokens")


@every_engine
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_default_does_not_see_padding(causal, budget, impl):
    q, k, v = qkv(200, 200, dtype=SINGLE)
    pad = [torch.cat([x, normal(*x[:, :, :56].shape, seed=40, dtype=SINGLE) * 9], 2) for x in (q, k, v)]
    mask = torch.ones(2, 1, 1, 256, dtype=torch.bool)
    mask[..., 200:] = False
    plain = sb.attention(q, k, v, is_causal=causal, budget=budget, impl=impl)
    assert_close(sb.attention(*pad, mask, is_causal=causal, budget=budget, impl=impl)[:, :, :200], plain, SINGLE, 10)


@every_engine
@pytest.mark.parametrize("pair", [p for p in EACH if not refused(p)], ids=name)
def test_masked_keys_take_no_gradient(pair, impl):
    q, k, v = qkv(20, 20, dtype=SINGLE)
    mask = some_keys(2, 20)
    mask[0, ..., :7] = False
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    _, dk, dv = grads(sb.attention(*inputs, mask, impl=impl, **parts(pair)), inputs)
    hidden = ~mask[:, 0, 0]
    assert not dv.transpose(1, 2)[hidden].any()
    assert not dk.transpose(1, 2)[hidden].any()


# What is left to torch


@pytest.mark.skipif(not NATIVE, reason="the native engine is not built")
@pytest.mark.parametrize("pair", [p for p in PAIRS if refused(p)], ids=name)
def test_pairs_that_are_not_covered(pair):
    q, k, v = qkv(40, 40, dtype=SINGLE)
    _refused_by_name_and_done_by_torch(refused(pair), q, k, v, **parts(pair))


LEFT = {
    "float64": (qkv(20, 20), {}, "float32"),
    "dropout": (qkv(20, 20, dtype=SINGLE), {"dropout_p": 0.5}, "dropout"),
    "wide-heads": (qkv(20, 20, d=257, dtype=SINGLE), {}, "256"),
    "wide-values": (qkv(20, 20, e=300, dtype=SINGLE), {}, "256"),
    "twice-with-means": (qkv(20, 20, dtype=SINGLE), {"low_rank": MAPS["means"], "double_count": True}, "twice"),
    "twice-with-global-rows": (
        qkv(20, 20, dtype=SINGLE),
        {"support": sb.GlobalTokens(2), "low_rank": MAPS["performer"], "double_count": True},
        "twice",
    ),
    "two-routed": (qkv(20, 20, dtype=SINGLE), {"support": sb.Routed(1, clusters=4) | sb.Routed(2, clusters=5)}, "one routed"),
    "routed-and-buckets": (qkv(20, 20, dtype=SINGLE), {"support": sb.Routed(1, clusters=4) | sb.LSH(1, bucket=4)}, "without other buckets"),
    "other-clusters": (qkv(20, 20, dtype=SINGLE), {"support": sb.Routed(1, clusters=4), "low_rank": sb.ClusterMeans(5)}, "same clusters"),
}


@pytest.mark.skipif(not NATIVE, reason="the native engine is not built")
@pytest.mark.parametrize("case", LEFT)
def test_calls_that_are_not_covered(case):
    inputs, more, why = LEFT[case]
    _refused_by_name_and_done_by_torch(why, *inputs, **{"support": sb.Window(4), **more})


def _refused_by_name_and_done_by_torch(why, q, k, v, **method):
    for impl in ("native", *NATIVE):
        with pytest.raises(ValueError) as error:
            sb.attention(q, k, v, impl=impl, **method)
        text = str(error.value)
        assert "\n" not in text and text.startswith("impl") and why in text and "impl='auto'" in text
    said = sb.explain(q, k, v, **method)
    assert said.impl == "torch"
    assert why in said.why
    torch.manual_seed(3)
    auto = sb.attention(q, k, v, **method)
    torch.manual_seed(3)
    assert torch.equal(auto, sb.attention(q, k, v, impl="torch", **method))


@pytest.mark.skipif(not NATIVE, reason="the native engine is not built")
@pytest.mark.parametrize("pair", COVERED_COMMON, ids=name)
def test_auto_takes_the_fastest_engine_and_says_so(pair):
    q, k, v = qkv(40, 40, dtype=SINGLE)
    out = sb.attention(q, k, v, **parts(pair))
    assert torch.equal(out, sb.attention(q, k, v, impl=NATIVE[0], **parts(pair)))
    said = sb.explain(q, k, v, **parts(pair))
    assert said.impl.startswith("native")
    assert sb.explain(q, k, v, impl="torch", **parts(pair)).impl == "torch"


def test_an_engine_that_is_not_there(monkeypatch):
    q, k, v = qkv(20, 20, dtype=SINGLE)
    monkeypatch.setattr(native.library, "isas", lambda: ())
    monkeypatch.setattr(native, "isas", lambda: ())
    with pytest.raises(ValueError, match=r"compiler.*pip install"):
        sb.attention(q, k, v, impl="native", support=sb.Window(4))
    said = sb.explain(q, k, v, support=sb.Window(4))
    assert said.impl == "torch" and "compiler" in said.why and "pip install" in said.why
    assert torch.equal(sb.attention(q, k, v, support=sb.Window(4)), sb.attention(q, k, v, impl="torch", support=sb.Window(4)))


@pytest.mark.skipif(not NATIVE, reason="the native engine is not built")
def test_an_instruction_set_that_is_not_there(monkeypatch):
    q, k, v = qkv(20, 20, dtype=SINGLE)
    monkeypatch.setattr(native, "isas", lambda: ("portable",))
    with pytest.raises(ValueError, match="avx512"):
        sb.attention(q, k, v, impl="native-avx512", support=sb.Window(4))
    with pytest.raises(ValueError, match="impl must be one of"):
        sb.attention(q, k, v, impl="native-sse9", support=sb.Window(4))


@pytest.mark.skipif(not NATIVE, reason="the native engine is not built")
def test_another_versions_engine_is_refused_before_it_is_called(monkeypatch):
    """Structs of another length would be read beyond their end."""
    native.library.load.cache_clear()
    monkeypatch.setattr(native.library, "_layout", lambda library: 0)
    try:
        with pytest.raises(RuntimeError, match=r"_engine_\w+.so must be built from the sources beside it; got another version's; build it again"):
            sb.attention(*qkv(8, 8, dtype=torch.float32), support=sb.Window(4), low_rank=None)
    finally:
        native.library.load.cache_clear()
