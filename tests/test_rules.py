"""The rules of the design, each by a test that fails if it breaks. (Extremes and gradients: test_contract.py.)"""

import math

import pytest
import scatterbrain as sb
import torch
from scatterbrain.context import Context
from scatterbrain.impl import reference

from cases import EACH, MAPS, PAIRS, SIGNED, SUPPORTS, assert_close, grads, is_causal_ok, name, normal, parts, qkv, some_keys, truth

BOTH = [p for p in PAIRS if all(p)]


def softmax_attention(q, k, v, scale=None):
    return torch.softmax(q @ k.mT * (scale or 1 / math.sqrt(q.shape[-1])), -1) @ v


def weights_of(q, k, v, **kwargs):
    return sb.attention(q, k, v, impl="reference", return_weights=True, **kwargs)


# Rule 1


@pytest.mark.parametrize("pair", BOTH, ids=name)
def test_weight_is_exact_on_the_support_and_low_rank_off_it(pair):
    """Against the two methods alone: normalisers differ, so compare ratios to one entry's exact weight."""
    q, k, v = qkv(24, 24)
    method = parts(pair)
    out, w = weights_of(q, k, v, **method)
    on = truth(q, k, v, **method).support
    a = torch.exp(q @ k.mT / math.sqrt(q.shape[-1]))
    ctx = Context(q.flatten(0, 1), k.flatten(0, 1), 1 / math.sqrt(8), False, None)
    state = method["low_rank"].sample(8).to(q.device, q.dtype).state
    log_l, sign = reference.dense_low_rank(method["low_rank"].factor(ctx, state), ctx.q * ctx.scale, ctx.k, False)
    low = (sign * torch.exp(log_l)).view_as(w)
    expected = torch.where(on, a, low)
    expected = expected / expected.sum(-1, keepdim=True)
    condition = expected.abs().sum(-1).max().item()
    assert_close(w, expected, torch.float64, 10, condition)
    assert_close(w.sum(-1), torch.ones_like(w[..., 0]), torch.float64, 10, condition)
    assert_close(out, w @ v, torch.float64)
    assert_close(sb.attention(q, k, v, impl="torch", **method), w @ v, torch.float64, 10, condition)


# Rule 2


@pytest.mark.parametrize("low_rank", [None, *MAPS])
@pytest.mark.parametrize("full", [sb.Full(), sb.Window(2000), sb.TopK(24), sb.Window(4) | sb.Full()])
def test_full_support_is_softmax_attention(full, low_rank):
    q, k, v = qkv(24, 24)
    out = sb.attention(q, k, v, support=full, low_rank=MAPS.get(low_rank))
    assert_close(out, softmax_attention(q, k, v), torch.float64, 10, 1e4 if low_rank in SIGNED else 1.0)


@pytest.mark.parametrize("low_rank", MAPS)
def test_empty_support_is_the_low_rank_method(low_rank):
    """A window that reaches no key, against no support at all."""
    q, k, v = qkv(24, 24)
    nothing = sb.Columns(0, index=(3,))
    mask = torch.ones(2, 1, 1, 24, dtype=torch.bool)
    mask[..., 3] = False
    with_empty = sb.attention(q, k, v, mask, support=nothing, low_rank=MAPS[low_rank])
    alone = sb.attention(q, k, v, mask, low_rank=MAPS[low_rank])
    assert_close(with_empty, alone, torch.float64, 10, 1e4 if low_rank in SIGNED else 1.0)


@pytest.mark.parametrize("support", SUPPORTS)
def test_no_low_rank_is_softmax_over_the_support(support):
    q, k, v = qkv(24, 24)
    on = truth(q, k, v, support=SUPPORTS[support]).support
    logits = (q @ k.mT / math.sqrt(8)).masked_fill(~on, -torch.inf)
    expected = torch.nan_to_num(torch.softmax(logits, -1)) @ v
    for given in ({"support": SUPPORTS[support]}, {"support": SUPPORTS[support], "low_rank": None}):
        assert_close(sb.attention(q, k, v, **given), expected, torch.float64)


# Rule 3


@pytest.mark.parametrize("low_rank", [None, "performer", "means", "linformer"])
@pytest.mark.parametrize("support", SUPPORTS)
def test_overlapping_supports_count_once(support, low_rank):
    q, k, v = qkv(40, 40)
    one = SUPPORTS[support]
    other = sb.Window(9) | sb.Columns(3)
    low = MAPS.get(low_rank)
    assert_close(sb.attention(q, k, v, support=one | one | one, low_rank=low), sb.attention(q, k, v, support=one, low_rank=low), torch.float64, 10)
    a = sb.attention(q, k, v, support=one | other, low_rank=low)
    b = sb.attention(q, k, v, support=other | one | other, low_rank=low)
    assert_close(a, b, torch.float64, 10)
    assert sb.explain(q, k, v, support=one | other | one).entries_sparse == pytest.approx(
        truth(q, k, v, support=one | other).support.double().sum(-1).mean().item(), rel=1e-6
    )


# Rule 4

SCALE = 0.25


@pytest.mark.parametrize("distance", [0.3, 0.7, 1.1])
def test_theorem_2_unbiased_with_variance_one_minus_p_of_performers(distance):
    """One pair on the sphere, many draws of rotation and features. p is measured on draws of its own.

    The variances are compared draw by draw, (sb - a)^2 - (1 - p) (pf - a)^2, which has mean 0 if the theorem holds.
    scale 1/4: at 1 the estimate's fourth moment is e^(16) times larger, and no number of draws shows its variance.
    """
    d, m, draws = 16, 32, 24_000
    q = torch.zeros(1, d, dtype=torch.float64)
    k = q.clone()
    cosine = 1 - distance**2 / 2
    q[0, 0], k[0, 0], k[0, 1] = 1.0, cosine, math.sqrt(1 - cosine**2)
    performer, scatter, collided = _estimates(q, k, m, draws, seed=1)
    p = _collisions(q, k, draws, seed=10**6).double().mean().item()
    exact = math.exp(SCALE * cosine)
    assert 0.02 < p < 0.98
    assert torch.equal(scatter[collided], torch.full_like(scatter[collided], exact))
    for estimate in (performer, scatter):
        assert abs(_standard_errors(estimate - exact)) < 4.5, "biased"
    closed = exact**2 * (math.exp(SCALE * (2 + 2 * cosine)) - 1) / m  # Choromanski et al., Lemma 2, iid features
    assert abs(_standard_errors((performer - exact).square() - closed)) < 4.5, "Performer's variance"
    difference = (scatter - exact).square() - (1 - p) * (performer - exact).square()
    noise = difference.std().item() / math.sqrt(draws) + closed * math.sqrt(p * (1 - p) / draws)
    assert abs(difference.mean().item()) < 4.5 * noise, "not (1 - p) of Performer's variance"
    assert 9 * noise < p * closed, "the test must be able to tell 1 - p from 1"


def _standard_errors(x):
    return (x.mean() / (x.std() / math.sqrt(len(x)))).item()


def _estimates(q, k, m, draws, seed):
    """Unnormalised weight of the pair: library features, library hash, and the rule of the paper."""
    hit, parts, step = _collisions(q, k, draws, seed), [], 2000
    for n in range(draws // step):
        features = sb.Performer(m * step, orthogonal=False, seed=1000 * seed + n)
        state = {"projection": features.sample(q.shape[-1]).state["projection"].double()}
        f = features.factor(Context(q[None], k[None], SCALE, False, None), state)
        parts.append(torch.exp(f.log_phi + f.log_psi).view(step, m).sum(-1) * step)
    performer = torch.cat(parts)
    return performer, torch.where(hit, math.exp(SCALE * float((q * k).sum())), performer), hit


def _collisions(q, k, draws, seed):
    lsh = sb.LSH(draws, bucket=None, scheme="cross_polytope", seed=seed)
    state = {n: t.double() for n, t in lsh.sample(q.shape[-1]).state.items()}
    layers = lsh.select(Context(q[None], k[None], 1.0, False, None), state)
    return torch.stack([(layer.q_label[0, 0, 0] == layer.k_label[0, 0]) for layer in layers])


# Rule 5


@pytest.mark.parametrize("change", ["small", "huge"])
@pytest.mark.parametrize("pair", [p for p in PAIRS if is_causal_ok(p)], ids=name)
def test_causal_rows_do_not_see_later_tokens(pair, change):
    """Selected pairs equal, reference outputs equal to the bit, torch outputs to 1e-5."""
    n = 70
    q, k, v = qkv(n, n, batch=1)
    condition = 1e3 if pair[1] in SIGNED else 1.0
    for t in (0, 31, 40):
        later = [x.clone() for x in (q, k, v)]
        for seed, x in enumerate(later):
            x[:, :, t + 1 :] = normal(1, 2, n - t - 1, x.shape[-1], seed=20 + seed) * (1.0 if change == "small" else 1e3)
        method = {"causal": True, **parts(pair)}
        a, b = truth(q, k, v, **method), truth(*later, **method)
        assert torch.equal(a.support[:, :, : t + 1], b.support[:, :, : t + 1])
        assert torch.equal(a.out[:, :, : t + 1], b.out[:, :, : t + 1])
        fast = [sb.attention(*x, is_causal=True, **parts(pair))[:, :, : t + 1] for x in ((q, k, v), later)]
        assert (fast[0] - fast[1]).abs().max() <= 1e-5 * condition
        assert not torch.equal(a.out[:, :, t + 1 :], b.out[:, :, t + 1 :])


@pytest.mark.parametrize("budget", [1 / 8, 1 / 4])
@pytest.mark.parametrize("n", [70, 600])
def test_the_default_is_causal(n, budget):
    q, k, v = qkv(n, n, batch=1, dtype=torch.float32)
    t = n * 2 // 3
    later = [x.clone() for x in (q, k, v)]
    for x in later:
        x[:, :, t + 1 :] *= 50
    a, b = (sb.attention(*x, is_causal=True, budget=budget)[:, :, : t + 1] for x in ((q, k, v), later))
    assert (a - b).abs().max() <= 1e-5


@pytest.mark.parametrize("pair", [p for p in EACH if not is_causal_ok(p)], ids=name)
def test_methods_that_look_ahead_refuse_and_say_why(pair):
    q, k, v = qkv(12, 12)
    with pytest.raises(ValueError, match="is_causal=True") as error:
        sb.attention(q, k, v, is_causal=True, **parts(pair))
    assert "whole sequence" in str(error.value)


# Rule 6


@pytest.mark.parametrize("garbage", [1.0, 1e4, math.nan])
@pytest.mark.parametrize("pair", PAIRS, ids=name)
def test_appended_masked_keys_change_nothing(pair, garbage):
    """Keys alone, and tokens (queries too), as a padded batch has them."""
    n, extra = 40, 17
    q, k, v = qkv(n, n)
    pad = [torch.cat([x, torch.full_like(x[:, :, :extra], 1.0) * garbage], 2) for x in (q, k, v)]
    mask = torch.ones(2, 1, 1, n + extra, dtype=torch.bool)
    mask[..., n:] = False
    condition = 1e4 if pair[1] in SIGNED else 10.0
    for causal in (False, True) if is_causal_ok(pair) else (False,):
        plain = sb.attention(q, k, v, is_causal=causal, **parts(pair))
        keys_only = sb.attention(q, pad[1], pad[2], mask, is_causal=causal, **parts(pair))
        assert_close(keys_only, plain, torch.float64, 10, condition, "keys")
        if math.isfinite(garbage):
            tokens = sb.attention(*pad, mask, is_causal=causal, **parts(pair))[:, :, :n]
            assert_close(tokens, plain, torch.float64, 10, condition, "tokens")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("budget", [1 / 8, 1 / 3, 1.0])
def test_the_default_does_not_see_padding(causal, budget):
    q, k, v = qkv(200, 200)
    pad = [torch.cat([x, normal(*x[:, :, :56].shape, seed=40) * 9], 2) for x in (q, k, v)]
    mask = torch.ones(2, 1, 1, 256, dtype=torch.bool)
    mask[..., 200:] = False
    plain = sb.attention(q, k, v, is_causal=causal, budget=budget)
    assert_close(sb.attention(*pad, mask, is_causal=causal, budget=budget)[:, :, :200], plain, torch.float64, 10)


def test_padding_on_the_left_and_inside():
    q, k, v = qkv(40, 40)
    mask = some_keys(2, 40)
    mask[0, ..., :7] = False
    for pair in EACH:
        expected = truth(q, k, v, mask, **parts(pair))
        assert_close(sb.attention(q, k, v, mask, **parts(pair)), expected.out.detach(), torch.float64, 10, expected.condition, name(pair))


@pytest.mark.parametrize("pair", EACH, ids=name)
def test_masked_keys_take_no_gradient(pair):
    q, k, v = qkv(20, 20)
    mask = some_keys(2, 20)
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    _, dk, dv = grads(sb.attention(*inputs, mask, **parts(pair)), inputs)
    hidden = ~mask[:, 0, 0]
    assert hidden.any()
    assert not dv.transpose(1, 2)[hidden].any()
    assert not dk.transpose(1, 2)[hidden].any()
