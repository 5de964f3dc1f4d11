"""Clusters as queries tell them apart: what defines them, and routing by a threshold."""

import json
import math

import pytest
import scatterbrain as sb
import torch
from scatterbrain.fitted import fitted_chunks, fitted_clusters
from scatterbrain.impl.reference import dense_low_rank
from scatterbrain.names import from_dict
from scatterbrain.problem import check_inputs, resolve
from scatterbrain.selection import Buckets

from cases import NATIVE, engine_of, normal, qkv


def factors(q, k, v, causal=False, impl="torch", **parts):
    p = check_inputs(q, k, v, None, 0.0, causal, None, False)
    layers, low = p.factors(resolve(parts.get("support"), parts.get("low_rank"), None, False, p), engine_of(impl, p))
    return p, layers, low


def test_exact_where_all_queries_are_one():
    """Weighed as the mean query weighs them, keys need no support if no query differs from it."""
    q, k, v = qkv(1, 60)
    q = q.expand(-1, -1, 40, -1).contiguous()
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    fitted = sb.attention(q, k, v, support=None, low_rank=sb.ClusterMeans(5, fit="queries"))
    plain = sb.attention(q, k, v, support=None, low_rank=sb.ClusterMeans(5))
    assert torch.allclose(fitted, exact, atol=1e-5)
    assert (plain - exact).norm() > 0.1 * exact.norm()


def test_offsets_are_their_definition():
    q, k, v = qkv(50, 40)
    p, _, low = factors(q, k, v, low_rank=sb.ClusterMeans(4, fit="queries"))
    mean = (p.q * p.scale).mean(1)
    for g in range(p.q.shape[0]):
        for c in range(4):
            inside = low.node[g] == c
            logit = p.k[g][inside] @ mean[g]
            share = torch.softmax(logit, 0)
            gap = low.offset[g][inside] - (logit - (share * logit).sum())
            assert torch.allclose(gap, gap[:1].expand_as(gap)), "the spread's part is one a cluster"
            assert gap.numel() == 0 or gap[0] >= 0


@pytest.mark.parametrize("causal", [False, True])
def test_smaller_error_than_plain_clusters_where_queries_share_a_mean(causal):
    q, k, v = (normal(1, 2, 256, 16, seed=s) for s in range(3))
    q = q + 2 * normal(1, 2, 1, 16, seed=9)
    exact = torch.softmax((q @ k.mT / 4).masked_fill(~torch.ones(256, 256, dtype=torch.bool).tril(), -math.inf) if causal else q @ k.mT / 4, -1)
    errors = {}
    for fit in ("keys", "queries"):
        low = sb.ClusterMeans(16, chunk=64, per_chunk=4, inner=8, fit=fit)
        _, w = sb.attention(q, k, v, is_causal=causal, support=None, low_rank=low, impl="reference", return_weights=True)
        errors[fit] = float((w - exact).norm() / exact.norm())
    assert errors["queries"] < 0.8 * errors["keys"]


@pytest.mark.parametrize("impl", ["torch", *NATIVE])
@pytest.mark.parametrize("causal", [False, True])
def test_a_lower_gain_visits_more_and_never_more_than_top(causal, impl):
    q, k, v = qkv(128, 128, dtype=torch.float32)
    visited = []
    for gain in (-1.0, -4.0, -30.0):
        _, layers, _ = factors(q, k, v, causal, impl, support=sb.Routed(3, clusters=6, chunk=32, per_chunk=4, fit="queries", gain=gain))
        (layer,) = layers
        assert isinstance(layer, Buckets) and layer.q_label.shape[-1] == 3
        visited.append(int((layer.q_label >= 0).sum()))
    assert visited[0] < visited[1] < visited[2]


@pytest.mark.parametrize("impl", NATIVE)
@pytest.mark.parametrize("causal", [False, True])
def test_native_visits_what_torch_visits(causal, impl):
    """The same clusters where scores are not within rounding of the threshold; both know the same labels."""
    q, k, v = qkv(128, 128, dtype=torch.float32)
    support = sb.Routed(4, clusters=6, chunk=32, per_chunk=4, fit="queries", gain=-3.5)
    sets = []
    for name in ("torch", impl):
        _, (layer,), _ = factors(q, k, v, causal, name, support=support)
        at = torch.where(layer.q_label < 0, 99, layer.q_label)
        sets.append((torch.nn.functional.one_hot(at, 100)[..., :99].sum(-2), layer.k_label))
    same_labels = (sets[0][1] == sets[1][1]).all(-1)
    assert same_labels.float().mean() > 0.5
    assert ((sets[0][0] == sets[1][0]).all(-1)[same_labels]).float().mean() > 0.99


def test_routing_and_means_share_clusters():
    q, k, v = qkv(64, 64)
    p = check_inputs(q, k, v, None, 0.0, False, None, False)
    memo = {}
    ctx = p.context(memo, None, True)
    assert fitted_clusters(ctx, 6, 4) is fitted_clusters(ctx, 6, 4)
    layers = p.select(resolve(sb.Routed(2, clusters=6, fit="queries"), sb.ClusterMeans(6, fit="queries"), None, False, p), memo)
    low = sb.ClusterMeans(6, fit="queries").factor(ctx, {})
    assert layers[0].k_label is low.node


def test_low_rank_weights_are_the_offset_mean():
    q, k, v = qkv(30, 40)
    p, _, low = factors(q, k, v, low_rank=sb.ClusterMeans(4, fit="queries"))
    log_l, _ = dense_low_rank(low, p.q * p.scale, p.k, False)
    member = torch.nn.functional.one_hot(low.node, 4).to(p.k) * low.offset.exp()[..., None]
    mean = (member / member.sum(1, keepdim=True).clamp(min=1e-30)).mT @ p.k
    expected = ((p.q * p.scale) @ mean.mT).gather(2, low.node[:, None].expand(-1, 30, -1)) + low.offset[:, None]
    assert torch.allclose(log_l, expected)


def test_refuses_nonsense():
    with pytest.raises(ValueError, match="fit"):
        sb.ClusterMeans(4, fit="values")
    with pytest.raises(ValueError, match="order"):
        sb.ClusterMeans(4, fit="queries", order=2)
    with pytest.raises(ValueError, match="gain"):
        sb.Routed(2, gain=-3.0)
    with pytest.raises(ValueError, match="gain"):
        sb.Routed(2, fit="queries", gain=float("nan"))


@pytest.mark.parametrize("impl", ["reference", "torch", *NATIVE])
@pytest.mark.parametrize("causal", [False, True])
def test_heads_with_their_own_gains_are_as_if_alone(causal, impl):
    q, k, v = qkv(100, 100, heads=3, dtype=torch.float32)
    gains = (-1.0, -4.0, -30.0)

    def run(chosen, gain):
        support = sb.Routed(3, clusters=6, chunk=32, per_chunk=4, fit="queries", gain=gain)
        low = sb.ClusterMeans(6, chunk=32, per_chunk=4, inner=8, fit="queries")
        return sb.attention(*(t[:, chosen] for t in (q, k, v)), is_causal=causal, support=support, low_rank=low, impl=impl)

    together = run(slice(None), gains)
    alone = torch.cat([run(slice(h, h + 1), gain) for h, gain in enumerate(gains)], 1)
    assert torch.allclose(together, alone, atol=1e-5)
    assert not torch.allclose(together, run(slice(None), gains[0]), atol=1e-3)


def test_gains_are_one_a_head():
    q, k, v = qkv(64, 64, heads=2)
    support = sb.Routed(3, clusters=6, fit="queries", gain=(-1.0, -2.0, -3.0, -4.0))
    with pytest.raises(ValueError, match="gain must hold one number for each of 2 heads; got 4"):
        sb.attention(q, k, v, support=support, low_rank=None)  # though batch x heads is 4
    for wrong in ((), (float("inf"), 1.0), "a", (-1.0, None)):
        with pytest.raises(ValueError, match="gain must be a finite number, a tuple of one a head, or None"):
            sb.Routed(3, fit="queries", gain=wrong)
    assert from_dict(json.loads(support.to_json())) == support


@pytest.mark.parametrize("causal", [False, True])
def test_reach_is_how_far_a_query_is_from_the_mean_one(causal):
    """Of all queries, or of those of the chunk before; a masked query counts nowhere."""
    q, k, v = qkv(90, 90, batch=1)
    mask = torch.ones(1, 1, 1, 90, dtype=torch.bool)
    mask[..., 70:] = False
    p = check_inputs(q, k, v, mask, 0.0, causal, None, False)
    ctx = p.context({}, None, False)
    fitted = fitted_chunks(ctx, 32, 4, 4) if causal else fitted_clusters(ctx, 6, 4)
    for row in (3, 40, 69):
        chunk = max(0, row // 32 - 1)
        among = (p.q[0] * p.scale)[32 * chunk : min(70, 32 * chunk + 32)] if causal else (p.q[0] * p.scale)[:70]
        far = (p.q[0, row] * p.scale - among.mean(0)).norm()
        usual = (among - among.mean(0)).square().sum(-1).mean().sqrt()
        assert float(fitted.reach[0, row]) == pytest.approx(float(torch.log(far / usual)), abs=1e-6)
